"""The JSON documents of a root: their encoding, their checksum, and the files of manifests.

A segment's table, a step's manifest and a tag each lie in the attributes of a zarr group under the
key ``deltacheck``. Every document is checked whole when it is read. Unknown keys are ignored,
unknown ``must_understand`` features are refused (``docs/reference/format.md``, sections 2 and 3).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from deltacheck.errors import Damaged, SaveFailed, UnsupportedFormat, UnsupportedLeaf
from deltacheck.leaf.structs import inspect_types
from deltacheck.store import compact, layout, validation
from deltacheck.store.files import arrays
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import FEATURES, Brief, Manifest, SegmentTable, Tag

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


class _TableGroup(msgspec.Struct):
    attributes: dict[str, SegmentTable]


Document = TypeVar("Document", SegmentTable, Manifest, Tag)
Checked = TypeVar("Checked", Manifest, Brief)


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
    try:
        table = _TABLES.decode(content).attributes[layout.ATTRIBUTE]
        is_known = set(table.must_understand) <= set(FEATURES)
        if (table.format, table.version) == (layout.FORMAT, layout.VERSION) and is_known:
            validation.check_segment(table)
            return table
    except _WRONG:
        pass
    # What is wrong is found, and said, by the checks of all documents.
    return from_zarr_json(content, SegmentTable, source)


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
    try:
        group, is_canonical = _parse(content)
        body = group["attributes"][layout.ATTRIBUTE]
        checksum = body.pop("checksum")
        if not isinstance(checksum, str):
            raise TypeError("its checksum is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{source} is damaged: {error}") from error
    # Before the checksum, so that a document of a later version is not called damaged.
    check_version(body, source)
    # The slow checksum decides whenever the quick one does not match.
    if not (is_canonical and checksum == _quick_checksum(body)) and checksum != _checksum(body):
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


def _parse(content: bytes) -> tuple[Any, bool]:
    """Return the JSON value, and whether the fast parser could read it.

    The fast parser accepts only content that encodes to the same bytes again, so it cannot hide
    what the slow one refuses: of two equal keys it would keep one and give fewer bytes.
    """
    try:
        group = msgspec.json.decode(content)
        if msgspec.json.encode(group) == content:
            return group, True
    except (ValueError, RecursionError, msgspec.MsgspecError):
        # The slow parser reports what is wrong, if anything is.
        pass
    return json.loads(content, object_pairs_hook=_no_duplicates, parse_constant=_no_constant), False


def _quick_checksum(body: Mapping[str, Any]) -> str:
    """Return ``_checksum`` of a body of plain ASCII with numbers as Python writes them.

    For other bodies the result differs from every checksum, and the slow way decides.
    """
    return str(xxhash.xxh3_128_hexdigest(msgspec.json.encode(body, order="deterministic")))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    # Readers differ in which of two equal keys they keep.
    if len(result) != len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


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

    @classmethod
    def of(cls, content: bytes) -> Written:
        """Return the result for a manifest's content."""
        return cls(len(content), manifest_digest(content))


_CHECKS: Mapping[type[Any], Any] = {
    Manifest: validation.check_manifest,
    SegmentTable: validation.check_segment,
    Tag: validation.check_tag,
}


# Here, before several threads decode documents.
inspect_types(*_CHECKS)
_TABLES = msgspec.json.Decoder(_TableGroup)
