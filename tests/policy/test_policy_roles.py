"""Test the matching of leaves to parameters, with paths of real optimizer states.

Other optimizers must not be mistaken for Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deltacheck.leaf import tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import roles
from deltacheck.policy.parameters import Hyperparameters, Parameter, Roles, hyperparameters


def specs(**leaves: tuple[int, ...]) -> dict[str, LeafSpec]:
    """Return leaf specs: bfloat16 below ``params`` and ``model``, else float32.

    ``__`` in a name stands for ``/``.
    """
    paths = {path.replace("__", "/"): shape for path, shape in leaves.items()}
    narrow = ("params", "model")
    return {
        p: LeafSpec.of(p, s, "bfloat16" if p.startswith(narrow) else "float32")
        for p, s in sorted(paths.items())
    }


def by_first(result: Roles) -> dict[str | None, Parameter]:
    return {parameter.first: parameter for parameter in result.parameters}


OPTAX = {
    f"opt_state__0__{m}__{p}": s for m in ("mu", "nu") for p, s in (("a__w", (4, 4)), ("b", (3,)))
}
PARAMS = {"params__a__w": (4, 4), "params__b": (3,)}
COUNT: dict[str, tuple[int, ...]] = {"opt_state__0__count": ()}


def test_optax_moments_belong_to_the_weight_with_their_path() -> None:
    result = roles.find(specs(**OPTAX, **PARAMS, **COUNT), {})
    assert by_first(result)["opt_state/0/mu/a/w"] == Parameter(
        "opt_state/0/a/w",
        weight="params/a/w",
        first="opt_state/0/mu/a/w",
        second="opt_state/0/nu/a/w",
        count="opt_state/0/count",
        adam=True,
    )
    assert {path: role for path, (role, _) in result.of().items()} == {
        "params/a/w": "weight",
        "params/b": "weight",
        "opt_state/0/mu/a/w": "first_moment",
        "opt_state/0/mu/b": "first_moment",
        "opt_state/0/nu/a/w": "second_moment",
        "opt_state/0/nu/b": "second_moment",
        "opt_state/0/count": "count",
    }


def test_a_parallel_tree_of_masters_is_found_by_its_name() -> None:
    for name in ("master", "master_params", "state__fp32_params"):
        masters = {f"{name}__a__w": (4, 4), f"{name}__b": (3,)}
        result = by_first(roles.find(specs(**OPTAX, **PARAMS, **masters), {}))
        assert result["opt_state/0/mu/b"].master == f"{name}__b".replace("__", "/")
        assert result["opt_state/0/mu/b"].weight == "params/b"


def test_of_a_narrow_and_a_wide_tree_the_wide_one_is_the_master_but_unproven() -> None:
    result = by_first(roles.find(specs(**OPTAX, **PARAMS, other__a__w=(4, 4), other__b=(3,)), {}))
    parameter = result["opt_state/0/mu/a/w"]
    assert (parameter.weight, parameter.master, parameter.proven) == (
        "params/a/w",
        "other/a/w",
        False,
    )


def test_an_average_of_the_weights_is_not_the_weight() -> None:
    result = roles.find(specs(**OPTAX, **PARAMS, ema_params__a__w=(4, 4), ema_params__b=(3,)), {})
    assert [p.weight for p in result.parameters] == ["params/a/w", "params/b"]
    assert all(p.master is None and p.proven for p in result.parameters)


def test_a_layer_whose_name_ends_like_another_path_does_not_take_its_moments() -> None:
    extra = {
        "params__deep__b": (3,),
        "opt_state__0__mu__deep__b": (3,),
        "opt_state__0__nu__deep__b": (3,),
    }
    result = by_first(roles.find(specs(**OPTAX, **PARAMS, **extra), {}))
    assert result["opt_state/0/mu/b"].weight == "params/b"
    assert result["opt_state/0/mu/deep/b"].weight == "params/deep/b"


def test_layers_called_mu_and_nu_are_no_moments() -> None:
    leaves = {
        f"opt_state__0__{m}__{layer}__kernel": (2, 2)
        for m in ("mu", "nu")
        for layer in ("mu", "nu")
    }
    result = roles.find(
        specs(**leaves, params__mu__kernel=(2, 2), params__nu__kernel=(2, 2), **COUNT), {}
    )
    assert {p.first: p.weight for p in result.parameters} == {
        "opt_state/0/mu/mu/kernel": "params/mu/kernel",
        "opt_state/0/mu/nu/kernel": "params/nu/kernel",
    }


def test_a_leaf_elsewhere_that_is_called_like_a_weight_is_none() -> None:
    result = roles.find(specs(**OPTAX, **PARAMS, buffers__b=(3,)), {})
    assert by_first(result)["opt_state/0/mu/b"].weight == "params/b"
    assert "buffers/b" not in result.of()


def test_a_frozen_weight_is_a_weight_without_an_optimizer() -> None:
    result = roles.find(specs(**OPTAX, **PARAMS, params__frozen=(9, 9), data__x=(9, 9)), {})
    role, parameter = result.of()["params/frozen"]
    assert (role, parameter.first, parameter.adam) == ("weight", None, False)
    assert "data/x" not in result.of()


@pytest.mark.parametrize("name", ["nu_max", "exp_avg_diff", "v_row"])
def test_another_array_for_each_parameter_makes_an_optax_state_unknown(name: str) -> None:
    result = roles.find(specs(**OPTAX, **PARAMS, **{f"opt_state__0__{name}__a__w": (4, 4)}), {})
    adam = {p.name: p.adam for p in result.parameters}
    assert adam == {"opt_state/0/a/w": False, "opt_state/0/b": True}


def test_one_moment_alone_is_not_adam() -> None:
    lion = {path: shape for path, shape in OPTAX.items() if "mu" in path}
    assert [p.adam for p in roles.find(specs(**lion, **PARAMS, **COUNT), {}).parameters] == [
        False,
        False,
    ]


def test_injected_hyperparameters_are_read_from_leaves() -> None:
    inner = {
        path.replace("opt_state__0", "opt_state__1__inner_state__0"): shape
        for path, shape in OPTAX.items()
    }
    rates = {
        f"opt_state__1__hyperparams__{name}": () for name in ("learning_rate", "b1", "b2", "eps")
    }
    result = roles.find(specs(**inner, **PARAMS, **rates), {})
    group = "opt_state/1/hyperparams"
    assert {p.group for p in result.parameters} == {group}
    values = {f"{group}/learning_rate": 1e-3, f"{group}/b1": 0.9, f"{group}/b2": 0.999}
    assert hyperparameters(result, values) == {group: Hyperparameters(1e-3, 0.9, 0.999, None)}


# --- torch ----------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")


def flat(state: Any) -> tuple[dict[str, LeafSpec], dict[str, object], list[str]]:
    from deltacheck.backends.numpy_leaves import specs_of
    from deltacheck.backends.torch.state.leaves import describe

    result = tree.flatten(state, describe)
    return (
        specs_of(result),
        tree.scalars(result.skeleton),
        list(tree.array_paths(result.skeleton).values()),
    )


def model_of(make: Callable[[Any], Any], tied: bool = False) -> tuple[Any, Any]:
    """Return a model whose layers are not in the order of their names, trained for one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    for name in ("10", "9", "norm"):
        model.add_module(name, torch.nn.LayerNorm(4) if name == "norm" else torch.nn.Linear(4, 4))
    if tied:
        model[1].weight = model[0].weight
    optimizer = make(model)
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def weights_of(model: Any, optimizer: Any, result: Roles) -> dict[str, str]:
    """Return the true weight of each parameter name, by identity of the tensors."""
    names: dict[int, str] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names[id(tensor)] = min(f"model/{name}", names.get(id(tensor), "model/~"))
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return {
        f"optimizer/state/{i}": names[id(t)] for i, t in enumerate(tensors) if t in optimizer.state
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_numbered_torch_states_get_weights_by_shape_and_order(tied: bool, several: bool) -> None:
    def make(model: Any) -> Any:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = (
            [{"params": matrices}, {"params": vectors, "lr": 1e-4}]
            if several
            else [{"params": list(model.parameters())}]
        )
        return torch.optim.AdamW(groups, lr=1e-3)

    model, optimizer = model_of(make, tied)
    leaves, scalars, order = flat(
        {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    )
    result = roles.find(leaves, scalars, order)
    assert {p.name: p.weight for p in result.parameters} == weights_of(model, optimizer, result)
    assert all(p.adam and not p.proven and p.count == f"{p.name}/step" for p in result.parameters)
    rates = hyperparameters(result, scalars)
    assert [r.lr for r in rates.values()] == ([1e-3, 1e-4] if several else [1e-3])
    assert set(rates.values()) <= {Hyperparameters(lr, 0.9, 0.999, 1e-8) for lr in (1e-3, 1e-4)}
    assert {p.group for p in result.parameters} == rates.keys()


def test_parameters_without_state_and_frozen_weights_are_passed_over() -> None:
    def make(model: Any) -> Any:
        model[0].requires_grad_(False)
        model[1].bias.requires_grad_(False)
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = model_of(make)
    leaves, scalars, order = flat(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    result = roles.find(leaves, scalars, order)
    assert sorted(p.name for p in result.parameters) == [
        "optimizer/state/2",
        "optimizer/state/4",
        "optimizer/state/5",
    ]
    assert (
        result.of()["model/10.bias"][1].first is None or not result.of()["model/10.bias"][1].proven
    )


def test_a_wrong_guess_is_put_right_by_content() -> None:
    def make(model: Any) -> Any:
        from benchmarks.workloads.optimizer import MixedPrecisionAdamW

        model.bfloat16()
        return MixedPrecisionAdamW(list(model.parameters())[::-1], lr=1e-2, betas=(0.9, 0.999))

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = make(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    leaves, scalars, order = flat(state)
    tensors = {f"model/{k}": v for k, v in model.state_dict().items()}
    tensors |= {
        f"optimizer/state/{i}/master": fields["master"]
        for i, fields in state["optimizer"]["state"].items()
    }

    def is_cast(weight: str, master: str) -> bool:
        return bool(torch.equal(tensors[weight], tensors[master].bfloat16()))

    guessed = roles.find(leaves, scalars, order)
    truth = weights_of(model, optimizer, guessed)
    assert {p.name: p.weight for p in guessed.parameters} != truth
    assert not any(p.proven for p in guessed.parameters)
    proven = roles.prove(guessed, is_cast)
    assert {p.name: p.weight for p in proven.parameters} == truth
    assert all(p.proven and p.master == f"{p.name}/master" and p.adam for p in proven.parameters)
    assert all(p.count == "optimizer/param_groups/0/step" for p in proven.parameters)
    nothing = roles.prove(guessed, lambda weight, master: False)
    assert all(p.weight is None and not p.proven for p in nothing.parameters)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        torch.optim.NAdam,
        torch.optim.Adamax,
        torch.optim.Adafactor,
    ],
)
def test_other_torch_optimizers_are_not_adam(make: Any) -> None:
    model, optimizer = model_of(lambda model: make(model.parameters()))
    leaves, scalars, order = flat(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    result = roles.find(leaves, scalars, order)
    assert result.parameters
    assert not any(p.adam for p in result.parameters)
    assert all(p.unknown for p in result.parameters if p.first is not None)


@pytest.mark.parametrize("flattened", [False, True])
def test_states_under_names_get_the_weight_of_that_name(flattened: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = model_of(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    weights, moments = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flattened)
    )
    leaves, scalars, order = flat(
        {"model": {f"module._orig_mod.{k}": v for k, v in weights.items()}, "optimizer": moments}
    )
    result = roles.find(leaves, scalars, order)
    assert len(result.parameters) == 6
    for parameter in result.parameters:
        name = parameter.name.removeprefix("optimizer/state")[1:]
        assert parameter.weight == f"model/module._orig_mod.{name}"
        assert parameter.adam
        assert parameter.proven
        assert (leaves.get(str(parameter.count)) or scalars.get(str(parameter.count))) is not None
    assert set(hyperparameters(result, scalars).values()) == {
        Hyperparameters(1e-3, 0.9, 0.999, 1e-8)
    }


def test_eight_bit_states_are_unknown() -> None:
    state = {"state1": torch.zeros(4, 4, dtype=torch.uint8), "absmax1": torch.zeros(1), "step": 1}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]
    leaves, scalars, order = flat(
        {
            "model": {"w": torch.zeros(4, 4)},
            "optimizer": {"state": {0: state}, "param_groups": groups},
        }
    )
    (parameter,) = roles.find(leaves, scalars, order).parameters
    assert (parameter.adam, parameter.first, parameter.weight) == (False, None, "model/w")


def test_a_state_of_anything_else_has_no_parameters() -> None:
    leaves, scalars, order = flat(
        {"state": {"params": {"kernel": torch.zeros(2)}}, "x": torch.zeros(3)}
    )
    assert roles.find(leaves, scalars, order) == Roles()


@pytest.mark.parametrize(
    "change",
    [
        "nothing",
        "rates",
        "swapped parameters",
        "a leaf's shape",
        "a leaf's type",
        "a new leaf",
        "a new count",
    ],
)
def test_what_was_found_is_kept_only_while_it_is_still_true(change: str) -> None:
    leaves, scalars, _ = flat(two_groups())
    find = roles.Finder()
    before = find(leaves, scalars)
    path = "optimizer/state/0/exp_avg"
    match change:
        case "rates":
            scalars |= {"optimizer/param_groups/0/lr": 0.125}
        case "swapped parameters":
            scalars |= {
                "optimizer/param_groups/0/params/0": 1,
                "optimizer/param_groups/1/params/0": 0,
            }
        case "a leaf's shape":
            leaves |= {path: LeafSpec.of(path, (16,), "float32")}
        case "a leaf's type":
            leaves |= {path: LeafSpec.of(path, (4, 4), "bfloat16")}
        case "a new leaf":
            leaves |= {
                "optimizer/state/0/master": LeafSpec.of(
                    "optimizer/state/0/master", (4, 4), "float32"
                )
            }
        case "a new count":
            scalars |= {"optimizer/state/0/step": 3}
    assert find(leaves, scalars) == roles.find(leaves, scalars)
    assert (find(leaves, scalars) is before) == (change in ("nothing", "rates"))


def two_groups() -> Any:
    moments = {n: {name: torch.zeros(4, 4) for name in ("exp_avg", "exp_avg_sq")} for n in range(2)}
    groups = [
        {"lr": rate, "betas": (0.9, 0.999), "params": [n]} for n, rate in enumerate((1e-3, 1e-4))
    ]
    return {
        "model": {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)},
        "optimizer": {"state": moments, "param_groups": groups},
    }


def test_leaves_in_the_tree_of_deepspeed_belong_to_the_parameter_of_their_name() -> None:
    """Its files look like a torch state without moments, and are no parameters."""
    states = {f"optimizer__{key}__a.weight": (4, 4) for key in ("exp_avg", "exp_avg_sq")}
    rest = {"module__mean": (3,), "files__optim.pt__state__0__step": ()}
    leaves = specs(**states, **rest) | {
        "module/a.weight": LeafSpec.of("module/a.weight", (4, 4), "bfloat16"),
        "master/a.weight": LeafSpec.of("master/a.weight", (4, 4), "float32"),
    }
    group = {"lr": 1e-5, "betas": (0.9, 0.99), "step": 7, "params": ["a.weight"]}
    state = {
        "deepspeed": {"zero_stage": 2, "param_groups": [group]},
        "files": {"optim.pt": {"state": {"0": {}}, "param_groups": [{"lr": 1.0, "params": [0]}]}},
    }
    scalars = dict(tree.scalars(tree.flatten(state, lambda value: None).skeleton))
    result = roles.find(leaves, scalars)
    assert result.parameters == (
        Parameter(
            "optimizer/a.weight",
            weight="module/a.weight",
            master="master/a.weight",
            first="optimizer/exp_avg/a.weight",
            second="optimizer/exp_avg_sq/a.weight",
            count="deepspeed/param_groups/0/step",
            group="deepspeed/param_groups/0",
            adam=True,
        ),
    )
    assert hyperparameters(result, scalars) == {
        "deepspeed/param_groups/0": Hyperparameters(1e-5, 0.9, 0.99, None)
    }
