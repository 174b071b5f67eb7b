"""The JSON documents of a root: their encoding, their checksum, and the files of manifests.

A segment's table, a step's manifest and a tag each lie in the attributes of a zarr group under the
key ``deltacheck``. Every document is checked whole when it is read. Unknown keys are ignored,
unknown ``must_understand`` features are refused (``docs/reference/format.md``, sections 2 and 3).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from deltacheck.codec.extension import native
from deltacheck.errors import Damaged, SaveFailed, UnsupportedFormat, UnsupportedLeaf
from deltacheck.leaf.structs import inspect_types, unique_keys
from deltacheck.store import compact, layout, validation
from deltacheck.store.files import arrays
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import FEATURES, Brief, Manifest, ManifestHead, SegmentTable, Tag

MAX_DOCUMENT_BYTES = 256 << 20  # of one zarr.json; a larger one is refused before it is parsed
# Errors that the checks of a forged document may run into. All of them mean damage.
_WRONG = (
    msgspec.ValidationError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


Document = TypeVar("Document", SegmentTable, Manifest, Tag)
Bound = TypeVar("Bound", SegmentTable, Manifest, ManifestHead, Tag)
Checked = TypeVar("Checked", Manifest, Brief)

# The text around the body of a document and its checksum.
_BEGIN = layout.group_json({layout.ATTRIBUTE: {}})[:-3]
_CHECKSUM, _END = b',"checksum":"', b'"}}}'
_END_BYTES = len(_CHECKSUM) + 32 + len(_END)
_COMPACT = b'"compact":'


def to_attributes(document: SegmentTable | Manifest | Tag) -> dict[str, Any]:
    """Return the group attributes that carry ``document``, its checksum included."""
    if isinstance(document, Manifest) and document.lane_digests:
        body = compact.packed(document)
    else:
        body = msgspec.to_builtins(document)
    return {layout.ATTRIBUTE: {**body, "checksum": _checksum(body)}}


def bound_table(content: bytes, source: str) -> SegmentTable:
    """Return ``from_zarr_json`` of the table of a segment, whose file has a digest in a manifest.

    That digest, which the caller has compared, stands for the checksum, so that one call decodes
    the table into records.
    """
    return _decoded(content, SegmentTable) or from_zarr_json(content, SegmentTable, source)


def from_zarr_json(content: bytes, kind: type[Document], source: str) -> Document:
    """Decode and check a group's ``zarr.json``.

    Args:
        content: The file's content.
        kind: The type of the document.
        source: Name of the file, for errors.

    Raises:
        Damaged: The content is no JSON, or its checksum, schema or values are wrong.
        UnsupportedFormat: Another version or an unknown feature.
    """
    if len(content) > MAX_DOCUMENT_BYTES:
        raise Damaged(
            f"{source} has {len(content)} bytes, more than the {MAX_DOCUMENT_BYTES} that a document"
            " may have"
        )
    is_bound = _is_bound(content)
    decoded = _decoded(content, kind) if is_bound and _COMPACT not in content else None
    if decoded is not None:
        return decoded
    try:
        group = json.loads(content, object_pairs_hook=unique_keys, parse_constant=_no_constant)
        body = group["attributes"][layout.ATTRIBUTE]
        checksum = body.pop("checksum")
        if not isinstance(checksum, str):
            raise TypeError("its checksum is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{source} is damaged: {error}") from error
    # Before the checksum, so that a document of a later version is not called damaged.
    check_version(body, source)
    if not is_bound and checksum != _checksum(body):
        raise Damaged(
            f"{source} is damaged: its checksum is {_checksum(body)}, recorded is {checksum}"
        )
    try:
        document: Any = (
            compact.unpacked(body, len(content))
            if kind is Manifest and compact.is_compact(body)
            else msgspec.convert(body, kind)
        )
        _CHECKS[kind](document)
    except (*_WRONG, UnsupportedLeaf, Damaged) as error:
        raise Damaged(f"{source} is damaged: {error}") from error
    checked: Document = document
    return checked


def check_version(body: Mapping[str, Any], source: str) -> None:
    """Refuse another format, a later version, or an unknown feature."""
    if body.get("format") != layout.FORMAT:
        raise Damaged(f"{source} is not a document of the {layout.FORMAT} format")
    version = body.get("version")
    if version != layout.VERSION:
        raise UnsupportedFormat(
            f"{source} has format version {version!r}; this deltacheck reads version"
            f" {layout.VERSION}. Install the deltacheck that wrote it"
        )
    features = body.get("must_understand", [])
    unknown = (
        [feature for feature in features if feature not in FEATURES]
        if isinstance(features, list)
        else features
    )
    if unknown:
        raise UnsupportedFormat(
            f"{source} needs the features {unknown!r}, which this deltacheck does not know. Install"
            " a newer one"
        )


def _is_bound(content: bytes) -> bool:
    """Return True if the checksum of a document is right, without a complete reader of JSON.

    ``False`` says nothing: the text is not of the form in which this package writes documents of
    plain ASCII, or the checksum is another one.
    """
    checksum = content[-_END_BYTES : -len(_END)]
    is_known = content.startswith(_BEGIN) and content.endswith(_END)
    if not is_known or not checksum.startswith(_CHECKSUM):
        return False
    # The form has no duplicate keys, and numbers and text as Python writes them.
    canonical = native.canonical_json(content[len(_BEGIN) - 1 : -len(b"}}")])
    if canonical is None:
        return False
    body = canonical.replace(checksum[1:] + b'",', b"", 1)
    return xxhash.xxh3_128_hexdigest(body).encode() == checksum[len(_CHECKSUM) :]


def _decoded(content: bytes, kind: type[Bound]) -> Bound | None:
    """Return the document of a content that is bound by a checksum, in one call.

    ``None``: the checks of all documents must find, and say, what is wrong.
    """
    with contextlib.suppress(*_WRONG, UnsupportedLeaf, Damaged):
        document: Bound = _DECODERS[kind].decode(content).attributes[layout.ATTRIBUTE]
        is_known = set(document.must_understand) <= set(FEATURES)
        if is_known and (document.format, document.version) == (layout.FORMAT, layout.VERSION):
            _CHECKS[kind](document)
            return document
    return None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _checksum(body: Mapping[str, Any]) -> str:
    # The canonical form of section 1 of the format.
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return str(xxhash.xxh3_128_hexdigest(canonical.encode()))


def manifest_digest(content: bytes) -> str:
    """Return ``sha256:`` and the SHA-256 of a manifest's file, hexadecimal.

    A caller may keep it elsewhere to recognise a step. The manifest itself is bound by SHA-256. Its
    segments are bound by xxh3_128, which finds damage and mix-ups, but not a forger who makes other
    bytes with the same xxh3.
    """
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def read_manifest(path: Place) -> Manifest:
    """Read and check one manifest file."""
    return decode_manifest(arrays.read_file(path, MAX_DOCUMENT_BYTES), path)


def decode_manifest(content: bytes, path: Place) -> Manifest:
    """Decode and check the content of the manifest file ``path``."""
    try:
        return from_zarr_json(content, Manifest, str(path))
    except Damaged as error:
        error.file = str(path)
        raise


def decode_brief(content: bytes, path: Place) -> Brief:
    """Return the brief of the content of the manifest file ``path``.

    The checksum binds the rest of the manifest, whose rules ``decode_manifest`` checks.

    Raises:
        Damaged: The content is no manifest, or its checksum or its brief is wrong.
        UnsupportedFormat: Another version or an unknown feature.
    """
    # A compact form lists its segments elsewhere.
    is_plain = _COMPACT not in content and _is_bound(content)
    head = _decoded(content, ManifestHead) if is_plain else None
    # An element type that does not exist: the complete check names the leaf.
    with contextlib.suppress(UnsupportedLeaf):
        if head is not None:
            return Brief.of(head)
    return Brief.of(decode_manifest(content, path))


def check_place(path: Place, manifest: Checked, is_manager_step: bool) -> Checked:
    """Return the manifest if it belongs to the checkpoint in whose directory it lies.

    Raises:
        Damaged: It is another checkpoint's, as a partly restored backup may leave it.
    """
    name = path.parent.parent.name if is_manager_step else path.parent.name
    # Without a number at the end, the name of a step directory says nothing about the step.
    step = layout.step_name(name)
    if (
        (step is not None and step[1] != manifest.step)
        if is_manager_step
        else name != layout.checkpoint_id(manifest.seq)
    ):
        raise Damaged(
            f"{path} is the manifest of another checkpoint: of step {manifest.step}, sequence"
            f" number {manifest.seq}",
            file=path,
        )
    return manifest


def manifest_content(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file."""
    return layout.group_json(to_attributes(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file, after decoding it again and comparing."""
    content = manifest_content(manifest)
    if from_zarr_json(content, Manifest, "the manifest about to be written") != manifest:
        raise SaveFailed(
            f"step {manifest.step}: its manifest does not decode to itself; this is a defect,"
            " please report it"
        )
    return content


class Written(NamedTuple):
    """The result of a commit: the bytes of the manifest, and its ``manifest_digest``."""

    stored_bytes: int
    digest: str


_CHECKS: Mapping[type[Any], Any] = {
    Manifest: validation.check_manifest,
    ManifestHead: validation.check_head,
    SegmentTable: validation.check_segment,
    Tag: validation.check_tag,
}


# Here, before several threads decode documents.
inspect_types(*_CHECKS)
_DECODERS: Mapping[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(
        msgspec.defstruct("Group", [("attributes", dict[str, kind])])  # type: ignore[valid-type]
    )
    for kind in _CHECKS
}
