"""Promise: a state is filled in place, and whatever does not fit is listed before anything changes."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from everystep.engine.buffers import Consumed, Memory
from everystep.errors import CorruptCheckpoint, StateMismatch, UnsupportedState
from everystep.state import LeafMeta, Restore
from everystep.state.torch_arrays import window_writer
from support.states.memory_store import Saved, restore, save


def plan(into: object, saved: Saved) -> Restore:
    return Restore(into, saved.tree, saved.leaves, saved.aliases)


def test_arrays_are_read_into_their_own_memory() -> None:
    saved = save({"n": np.arange(4.0), "t": torch.arange(4.0), "l": [np.ones(2)]})
    into = {"n": np.zeros(4), "t": torch.zeros(4), "l": [np.zeros(2)]}
    kept = into["n"], into["t"], into["l"], into["l"][0]
    made = plan(into, saved)
    assert made.fresh == ()
    assert {type(where) for where in made.destinations.values()} == {Memory}
    assert made.destinations["t"].address == into["t"].data_ptr()
    assert restore(into, saved) is into
    assert all(
        now is then for now, then in zip((into["n"], into["t"], into["l"], into["l"][0]), kept, strict=True)
    )
    assert into["n"].tolist() == into["t"].tolist() == [0, 1, 2, 3]


def test_nothing_changes_before_reading() -> None:
    saved = save({"n": np.arange(4.0), "v": 5, "d": {"k": 1}})
    into = {"n": np.zeros(4), "v": 0, "d": {}}
    plan(into, saved)
    assert into["n"].tolist() == [0, 0, 0, 0]
    assert (into["v"], into["d"]) == (0, {})


@pytest.mark.parametrize(
    "view",
    [lambda x: x.T, lambda x: x[::2, 1:], lambda x: x[1:, :], lambda x: x[:0]],
    ids=["transposed", "steps", "offset", "empty"],
)
@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_strided_targets_are_filled_through_their_strides(view: Any, make: Any) -> None:
    base = make((4, 6))
    target = view(base)
    wanted = (
        np.random.default_rng(0)
        .random(tuple(target.shape))
        .astype(np.float32 if make is torch.zeros else float)
    )
    restore([target], save([torch.from_numpy(wanted) if make is torch.zeros else wanted]))
    assert np.array_equal(np.asarray(target), wanted)
    outside = np.asarray(base).copy()
    view(outside)[...] = 0
    assert not outside.any(), "bytes beside the view were touched"


def test_negative_strides_are_filled_backwards() -> None:
    base = np.zeros(5)
    restore([base[::-1]], save([np.arange(5.0)]))
    assert base.tolist() == [4, 3, 2, 1, 0]


def test_a_torch_leaf_fills_a_numpy_array_and_the_reverse() -> None:
    into = {"a": np.zeros(3, np.float32), "b": torch.zeros(3)}
    restore(into, save({"a": torch.ones(3), "b": np.ones(3, np.float32)}))
    assert into["a"].tolist() == into["b"].tolist() == [1, 1, 1]
    assert isinstance(into["a"], np.ndarray)


def test_conjugate_targets_receive_values_not_bits() -> None:
    base = torch.zeros(3, dtype=torch.complex64)
    wanted = torch.randn(3, dtype=torch.complex64)
    into = [base.conj()]
    restore(into, save([wanted]))
    assert torch.equal(into[0], wanted)
    assert torch.equal(base, wanted.conj().resolve_conj())


def test_targets_that_cannot_be_written_are_replaced() -> None:
    locked = np.zeros(3)
    locked.flags.writeable = False
    into: dict[str, Any] = {"locked": locked, "wide": torch.zeros(1).expand(4)}
    restore(into, save({"locked": np.arange(3.0), "wide": torch.arange(4.0)}))
    assert into["locked"].tolist() == [0, 1, 2]
    assert into["wide"].tolist() == [0, 1, 2, 3]
    assert locked.tolist() == [0, 0, 0]


def test_autograd_notices_that_memory_changed() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    restore([weight], save([torch.zeros(3)]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class TestValues:
    def test_values_are_set_in_dicts_and_lists(self) -> None:
        into = {"a": np.zeros(1), "epoch": 0, "cfg": {"lr": 0.0, "deep": {"x": 1}}, "log": [np.zeros(1), 7]}
        cfg, deep, log = into["cfg"], into["cfg"]["deep"], into["log"]
        restore(
            into,
            save(
                {
                    "a": np.ones(1),
                    "epoch": 4,
                    "cfg": {"lr": 0.5, "deep": {"x": 2, "y": 3}},
                    "log": [np.ones(1), 8],
                }
            ),
        )
        assert into["epoch"] == 4
        assert into["cfg"] is cfg
        assert cfg["deep"] is deep
        assert cfg == {"lr": 0.5, "deep": {"x": 2, "y": 3}}
        assert into["log"] is log
        assert log[1] == 8

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ([1, 2, 3], [4]),
            ([], [1, [2]]),
            ({1}, {2, 3}),
            ({"a": 1}, {"b": 2}),
            (OrderedDict(a=1), OrderedDict(b=2)),
            (Counter("ab"), Counter("c")),
            (defaultdict(list, a=[1]), defaultdict(list, b=[2])),
            (Namespace(a=1), Namespace(b=[2])),
            (deque([1], 3), deque([2, 3], 3)),
            (bytearray(b"abc"), bytearray(b"d")),
        ],
    )
    def test_containers_of_values_keep_their_identity_and_take_the_contents(self, old: Any, new: Any) -> None:
        into = {"x": old}
        restore(into, save({"x": new}))
        assert into["x"] is old
        assert old == new
        assert type(old) is type(new)

    def test_a_value_of_another_type_replaces_the_old(self) -> None:
        into = {"x": 3, "d": deque([1], 2), "t": (1, 2)}
        restore(into, save({"x": "three", "d": deque([1], 5), "t": (3,)}))
        assert into == {"x": "three", "d": deque([1], 5), "t": (3,)}
        assert into["d"].maxlen == 5

    def test_arrays_in_a_namespace_and_a_defaultdict_are_filled_in_place(self) -> None:
        array, other = np.zeros(2), torch.zeros(2)
        into = {"args": Namespace(mean=array, lr=0), "held": defaultdict(list, a=[other])}
        args, held = into["args"], into["held"]
        restore(into, save({"args": Namespace(mean=np.ones(2), lr=3), "held": {"a": [torch.ones(2)]}}))
        assert (into["args"], into["held"]) == (args, held)
        assert args.mean is array
        assert array.tolist() == other.tolist() == [1, 1]
        assert args.lr == 3
        assert held["new"] == []
        wrong = plan({"args": Namespace(mean=array)}, save({"args": {"mean": np.ones(2)}})).mismatch.wrong
        assert len(wrong) == 1

    def test_tuples_are_rebuilt_around_arrays_filled_in_place(self) -> None:
        array = np.zeros(2)
        result = restore((array, 1), save((np.ones(2), 2)))
        assert result[0] is array
        assert array.tolist() == [1, 1]
        assert result[1] == 2

    def test_a_place_still_empty_takes_arrays_too(self) -> None:
        into: dict[str, Any] = {"model": np.zeros(1), "best": None, "ema": {}, "history": []}
        restore(
            into,
            save(
                {
                    "model": np.ones(1),
                    "best": torch.ones(2),
                    "ema": {"w": torch.ones(3)},
                    "history": [np.ones(1)],
                }
            ),
        )
        assert into["best"].tolist() == [1, 1]
        assert into["ema"]["w"].tolist() == [1, 1, 1]
        assert into["history"][0].tolist() == [1]

    def test_an_empty_dict_takes_everything(self) -> None:
        into: dict[str, Any] = {}
        assert restore(into, save({"w": np.ones(1), "n": 1})) is into
        assert into["n"] == 1

    def test_keys_of_any_kind_are_matched(self) -> None:
        into: dict[Any, Any] = {1: np.zeros(1), "1": np.zeros(1), (2, None): 0}
        restore(into, save({1: np.array([1.0]), "1": np.array([2.0]), (2, None): 3}))
        assert (into[1][0], into["1"][0], into[(2, None)]) == (1, 2, 3)


class TestMismatch:
    def test_everything_that_does_not_fit_is_listed(self) -> None:
        saved = save({"a": {"w": np.zeros((3, 4), np.float32)}, "old": [np.zeros(1)], "note": "x", "t": 5})
        into = {
            "a": {"w": np.zeros((4, 4), np.float32)},
            "new": {"b": torch.zeros(2)},
            "step": 0,
            "t": np.zeros(1),
        }
        mismatch = plan(into, saved).mismatch
        assert mismatch
        assert mismatch.missing == ("new.b", "step")
        assert mismatch.extra == ("old.0", "note")
        assert mismatch.wrong == (
            "a.w: checkpoint F32[3,4], target F32[4,4]",
            "t: checkpoint holds the value 5, target a numpy.ndarray",
        )

    def test_the_error_lists_them_and_says_nothing_was_changed(self) -> None:
        into = {"a": np.zeros(1), "c": np.zeros(1), "d": np.zeros(1)}
        saved = save({"a": np.zeros(2), "b": np.zeros(1), "d": np.zeros(1)})
        with pytest.raises(StateMismatch, match="Nothing has been changed") as caught:
            restore(into, saved)
        assert (caught.value.missing, caught.value.extra) == (("c",), ("b",))
        assert caught.value.wrong == ("a: checkpoint F64[2], target F64[1]",)
        assert "strict=False" in str(caught.value)

    def test_a_long_list_is_abridged_in_the_message_only(self) -> None:
        mismatch = plan({"x": np.zeros(1)}, save({f"w{i}": np.zeros(1) for i in range(500)})).mismatch
        assert len(mismatch.extra) == 500
        assert "480 more" in str(mismatch)
        assert len(str(mismatch)) < 2000

    def test_what_fits_is_restored_when_asked_not_to_be_strict(self) -> None:
        saved = save({"w": np.ones(2), "bad": np.ones(3), "extra": np.ones(1), "n": 5})
        into = {"w": np.zeros(2), "bad": np.zeros(2), "n": 0, "mine": np.full(1, 9.0)}
        made = plan(into, saved)
        assert set(made.destinations) == {"w"}
        assert made.fresh == ()
        restore(into, saved, strict=False)
        assert into["w"].tolist() == [1, 1]
        assert into["bad"].tolist() == [0, 0]
        assert into["n"] == 5
        assert into["mine"].tolist() == [9]
        assert "extra" not in into

    def test_dtype_differences_are_wrong(self) -> None:
        made = plan([torch.zeros(2, dtype=torch.bfloat16)], save([torch.zeros(2, dtype=torch.float16)]))
        assert made.mismatch.wrong == ("0: checkpoint F16[2], target BF16[2]",)

    def test_lists_of_different_length_list_the_rest(self) -> None:
        saved = save({"l": [np.zeros(1), np.zeros(1)]})
        assert plan({"l": [np.zeros(1)]}, saved).mismatch.extra == ("l.1",)
        assert plan({"l": [np.zeros(1)] * 1 + [np.zeros(1), np.zeros(1)]}, saved).mismatch.missing == ("l.2",)

    def test_a_dict_where_a_list_of_arrays_is_wanted_is_wrong(self) -> None:
        mismatch = plan({"l": [np.zeros(1)]}, save({"l": {"a": np.zeros(1)}})).mismatch
        assert mismatch.wrong == ("l: checkpoint holds a dict, target a list with arrays",)

    def test_no_mismatch_is_false(self) -> None:
        assert not plan([np.zeros(1)], save([np.zeros(1)])).mismatch


class TestSharedMemory:
    def test_tied_in_both_is_read_once(self) -> None:
        shared = torch.zeros(3)
        source = torch.arange(3.0)
        into = {"a": shared, "b": shared}
        made = plan(into, save({"a": source, "b": source}))
        assert set(made.destinations) == {"a"}
        assert not made.fresh
        restore(into, save({"a": source, "b": source}))
        assert into["b"] is shared
        assert shared.tolist() == [0, 1, 2]

    def test_tied_in_the_checkpoint_only_fills_both(self) -> None:
        source = torch.arange(3.0)
        into = {"a": torch.zeros(3), "b": torch.zeros(3)}
        restore(into, save({"a": source, "b": source}))
        assert into["a"].tolist() == into["b"].tolist() == [0, 1, 2]

    def test_tied_in_the_target_only_is_reported_since_one_would_be_lost(self) -> None:
        shared = np.zeros(3)
        saved = save({"a": np.ones(3), "b": np.full(3, 2.0)})
        into = {"a": shared, "b": shared}
        assert plan(into, saved).mismatch.wrong == ("b: checkpoint stored apart from a, target tied to it",)
        restore(into, saved, strict=False)
        assert shared.tolist() == [1, 1, 1]

    def test_overlapping_views_in_the_target_are_never_read_into_at_once(self) -> None:
        base = np.zeros(10)
        source = np.arange(10.0)
        into = {"all": base, "head": base[:4], "tail": base[6:], "even": base[::2]}
        saved = save({"all": source, "head": source[:4], "tail": source[6:], "even": source[::2]})
        made = plan(into, saved)
        assert not made.mismatch
        assert set(made.destinations) == {"all"}
        assert set(made.fresh) == {"head", "tail", "even"}
        restore(into, saved)
        assert base.tolist() == source.tolist()

    @pytest.mark.parametrize("make", [np.zeros, lambda n: torch.zeros(n, dtype=torch.float64)])
    def test_overlapping_views_that_differ_in_the_checkpoint_are_reported(self, make: Any) -> None:
        saved = save({"a": np.arange(10.0), "b": np.ones(3)})
        z = make(10)
        with pytest.raises(StateMismatch, match="b and a share memory"):
            restore({"a": z, "b": z[2:5]}, saved)

    def test_views_that_overlap_only_each_other_are_compared_too(self) -> None:
        z = np.zeros(10)
        target = {"a": z[:4], "b": z[3:8], "c": z[7:]}
        saved = save({"a": np.arange(4.0), "b": np.arange(3.0, 8.0), "c": np.array([9.0, 8.0, 9.0])})
        with pytest.raises(StateMismatch, match="c and b share memory"):
            restore(target, saved)

    def test_views_that_overlapped_when_they_were_saved_come_back(self) -> None:
        def views(z: Any) -> dict[str, Any]:
            matrix = z.reshape(4, 6)
            return {
                "row": matrix[1],
                "all": z,
                "column": matrix[:, 2],
                "block": matrix[::2, 1:3],
                "end": z[20:],
            }

        source = np.random.default_rng(0).normal(size=24)
        z = np.zeros(24)
        restore(views(z), save(views(source)))
        assert np.array_equal(z, source)

    def test_columns_beside_each_other_share_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("everystep.state.overlaps._AT_ONCE_NBYTES", 100)
        source = torch.randn(50, 6, dtype=torch.float64)
        z = torch.zeros(50, 6, dtype=torch.float64)
        q, k, v = source.split([2, 1, 3], 1)
        restore({"q": z[:, :2], "k": z[:, 2:3], "v": z[:, 3:]}, save({"q": q, "k": k, "v": v}))
        assert torch.equal(z, source)
        with pytest.raises(StateMismatch, match="k and q share memory"):
            restore({"q": z[:, :2], "k": z[:, 1:2]}, save({"q": source[:, :2], "k": source[:, 2:3]}))

    def test_views_that_run_backwards_are_compared_where_they_are(self) -> None:
        saved = save({"a": np.arange(10.0), "b": np.arange(9.0, 4.0, -1.0)})
        z = np.zeros(10)
        restore({"a": z, "b": z[:4:-1]}, saved)
        assert np.array_equal(z, np.arange(10.0))
        with pytest.raises(StateMismatch, match="share memory"):
            restore({"a": z, "b": z[5::-1][:5]}, saved)

    def test_neighbours_do_not_overlap(self) -> None:
        base = np.zeros(10)
        made = plan([base[:5], base[5:]], save([np.ones(5), np.ones(5)]))
        assert set(made.destinations) == {"0", "1"}

    def test_an_alias_without_a_target_of_its_own_shares_the_live_array(self) -> None:
        source = np.arange(3.0)
        live = np.zeros(3)
        into: dict[str, Any] = {"a": live, "best": None}
        restore(into, save({"a": source, "best": source}))
        assert into["best"] is live


class TestStateful:
    class Loader:
        def __init__(self) -> None:
            self.at = 0
            self.buffer = np.zeros(0)

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "buffer": self.buffer}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at, self.buffer = state["at"], state["buffer"]

    def test_objects_are_handed_what_they_saved(self) -> None:
        saved_one, loader = self.Loader(), self.Loader()
        saved_one.at, saved_one.buffer = 7, np.arange(3)
        saved = save({"data": saved_one})
        assert plan({"data": loader}, saved).fresh == ("data.buffer",)
        assert restore({"data": loader}, saved)["data"] is loader
        assert loader.at == 7
        assert loader.buffer.tolist() == [0, 1, 2]

    def test_a_refusal_names_the_place(self) -> None:
        with pytest.raises(StateMismatch, match=r"data\.main.*failed with the saved state.*'at'"):
            restore({"data": {"main": self.Loader()}}, save({"data": {"main": {"other": 1}}}))

    def test_a_missing_object_is_listed(self) -> None:
        assert plan({"d": self.Loader(), "w": np.zeros(1)}, save({"w": np.zeros(1)})).mismatch.missing == (
            "d.buffer",
        )


def test_a_tree_that_names_an_unknown_leaf_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        Restore({"a": np.zeros(1)}, {"a": {"$leaf": "w"}}, {}, {})
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        Restore({"a": None}, {"a": {"$leaf": "w"}}, {}, {})


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_targets_that_could_not_be_saved_are_refused() -> None:
    saved = save({"a": np.zeros(1)})
    for target in (
        torch.eye(1).to_sparse(),
        np.array([object()]),
        torch.empty(1, device="meta"),
        np.matrix([1.0]),
    ):
        with pytest.raises(UnsupportedState, match="'a'"):
            Restore({"a": target}, saved.tree, saved.leaves, {})


def test_a_target_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop.update(self=loop, a=np.zeros(1))
    with pytest.raises(UnsupportedState, match="holds itself"):
        Restore(loop, {"a": {"$leaf": "a"}, "self": {"a": 1}}, {"a": LeafMeta("a", "F64", (1,), "numpy")}, {})


class Plain:
    def __init__(self) -> None:
        self.w = np.zeros(3)


class Own(dict[str, Any]):
    pass


Pair = namedtuple("Pair", ["array", "number"])


@pytest.mark.parametrize(
    ("target", "place", "kind"),
    [
        ({"x": Own(a=np.zeros(4))}, "x", "Own"),
        ({"x": Plain()}, "x", "Plain"),
        ({"x": 5}, "x", "int"),
        ({"x": {"a"}}, "x", "set"),
        ({"x": {"a": Plain()}}, "x.a", "Plain"),
        (Plain(), "_", "Plain"),
        (5, "_", "int"),
        (False, "_", "bool"),
    ],
)
def test_a_target_that_cannot_take_arrays_is_reported(target: Any, place: str, kind: str) -> None:
    planned = plan(target, save({"x": {"a": np.arange(3.0)}}))
    (wrong,) = planned.mismatch.wrong
    assert wrong.startswith(f"{place}: checkpoint holds a")
    assert kind in wrong.partition("target")[2]


def test_a_named_tuple_is_no_tuple_to_restore() -> None:
    """Saving refuses it, since it would come back as a tuple."""
    saved = save({"t": (torch.ones(2), 5), "l": [torch.ones(2), 1]})
    live = torch.zeros(3)
    planned = plan({"t": Pair(live, 0), "l": [Pair(live, 0), 1]}, saved)
    assert [wrong.partition(":")[0] for wrong in planned.mismatch.wrong] == ["t", "l.0"]


@pytest.mark.parametrize("shape", [(3, 0, 2), (0,), (0, 4)])
def test_arrays_without_elements_stay_the_same_objects(shape: tuple[int, ...]) -> None:
    target = {"n": np.zeros(shape), "t": torch.zeros(shape)}
    n, t = target["n"], target["t"]
    restored = restore(target, save({"n": np.ones(shape), "t": torch.ones(shape)}))
    assert restored["n"] is n
    assert restored["t"] is t


def test_a_number_may_have_become_an_array_and_none_says_nothing() -> None:
    saved = save({"best": torch.tensor(0.5), "x": {"a": np.arange(3.0)}, "plain": {"a": 1}})
    target: dict[str, Any] = {"best": float("inf"), "x": None, "plain": defaultdict(int)}
    restored = restore(target, saved)
    assert restored["best"] == 0.5
    assert restored["plain"] == {"a": 1}
    assert np.array_equal(restored["x"]["a"], np.arange(3.0))


def test_a_missing_object_that_could_not_be_saved_is_missing() -> None:
    planned = plan({"a": np.zeros(3), "b": Plain()}, save({"a": np.arange(3.0)}))
    assert planned.mismatch.missing == ("b",)


def test_nan_among_the_keys_is_found() -> None:
    state = {math.nan: np.arange(3.0), (1, np.float32("nan")): np.ones(2), -math.nan: 5, 1: np.ones(1)}
    saved = save(state)
    live = np.zeros(3)
    target = {math.nan: live, (1, np.float32("nan")): np.zeros(2), -math.nan: 0, 1: np.zeros(1)}
    restored = restore(target, saved)
    assert restored is target
    assert np.array_equal(live, np.arange(3.0))
    assert [np.sum(value) for value in target.values()] == [3, 2, 5, 1]


def test_a_target_that_cannot_be_filled_is_not_said_to_be_stored() -> None:
    saved = save({"a": np.zeros(1)})
    with pytest.raises(UnsupportedState, match="cannot restore into the target at 'a'"):
        plan({"a": torch.eye(1).to_sparse()}, saved)


def test_device_destinations_take_windows() -> None:
    target = torch.zeros(10, dtype=torch.int16)
    where = Consumed(target.nbytes, window_writer(target))
    from support.states.memory_store import write

    write(where, np.arange(10, dtype=np.int16).tobytes())
    assert target.tolist() == list(range(10))
