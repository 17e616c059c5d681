"""What can be a source, and many items from several threads."""

from __future__ import annotations

import random
import threading
import warnings

import jax
import numpy as np
import pytest

import hostcall as hc
from hostcall.errors import FeedError, SpecError


def all_of(feed, n):
    run = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed()), 0, length=n)[1])
    items, oks = run()
    return jax.tree.map(lambda leaf: leaf[np.asarray(oks)], items)


def test_arrays_and_trees_by_batch():
    data = {"x": np.arange(14.0).reshape(7, 2), "y": np.arange(7)}
    with hc.feed(data, batch=3) as feed:
        assert feed.spec["x"] == jax.ShapeDtypeStruct((3, 2), np.float32)
        got = all_of(feed, 4)
    assert got["x"].reshape(-1, 2).tolist() == data["x"][:6].tolist()
    assert got["y"].reshape(-1).tolist() == list(range(6))


@pytest.mark.parametrize("kind", ["pandas", "pyarrow"])
def test_tables_by_batch(kind):
    package = pytest.importorskip(kind)
    columns = {"a": np.arange(5), "b": np.arange(5) / 2}
    make = package.DataFrame if kind == "pandas" else package.table
    table = make(columns)
    with hc.feed(table, batch=2) as feed:
        got = all_of(feed, 3)
    assert got["a"].reshape(-1).tolist() == [0, 1, 2, 3]
    assert got["b"].reshape(-1).tolist() == [0, 0.5, 1, 1.5]
    with pytest.raises(SpecError, match="Say how many rows an item has: batch=32"):
        hc.feed(table)


def test_a_loader_of_torch():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(8.0), torch.arange(8))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    with hc.feed(loader) as feed:
        x, y = all_of(feed, 3)
    assert x.reshape(-1).tolist() == y.reshape(-1).tolist() == list(range(8))


def test_a_data_set_of_grain():
    grain = pytest.importorskip("grain.python")
    data = grain.MapDataset.range(10).to_iter_dataset()
    with hc.feed(data) as feed:
        assert all_of(feed, 4).tolist() == [0, 1, 2, 3]
        state = feed.state()
        rest = all_of(feed, 6).tolist()
    with hc.feed(data) as feed:
        feed.restore(state)
        assert all_of(feed, 6).tolist() == rest


@pytest.fixture
def stateful():
    """A function that makes a StatefulDataLoader of torchdata."""
    # torchdata calls what newer releases of torch warn of.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    data = pytest.importorskip("torchdata.stateful_dataloader")
    torch = pytest.importorskip("torch")
    numbers = torch.utils.data.TensorDataset(torch.arange(24))

    def make(shuffle):
        order = torch.Generator()
        order.manual_seed(1)
        return data.StatefulDataLoader(
            numbers, batch_size=2, shuffle=shuffle, generator=order
        )

    return make


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_torchdata_goes_on_in_the_middle(stateful, shuffle):
    with hc.feed(stateful(shuffle)) as feed:
        (first,) = all_of(feed, 3)
        state = feed.state()
        (rest,) = all_of(feed, 12)
    assert "source" in state  # the loader's own, not a count of items to skip
    seen = np.concatenate([first, rest]).reshape(-1).tolist()
    assert sorted(seen) == list(range(24))
    assert (seen != sorted(seen)) == shuffle
    with hc.feed(stateful(shuffle)) as feed:  # in another process, say
        feed.restore(state)
        assert all_of(feed, 12)[0].tolist() == rest.tolist()
        feed.reset()
        assert len(all_of(feed, 20)[0]) == 12


@pytest.fixture
def tf(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own imports use what is deprecated
        return pytest.importorskip("tensorflow")


TF_SOURCES = {
    "the data set": lambda data: data,
    "arrays": lambda data: data.as_numpy_iterator(),
    "eager tensors": iter,
    "a function": lambda data: lambda: data,
}


@pytest.mark.parametrize("kind", TF_SOURCES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_data_set_of_tensorflow(tf, kind, dtype):
    data = tf.data.Dataset.range(10)
    data = data.map(lambda i: {"x": tf.cast(i, dtype), "i": i})
    data = data.batch(3, drop_remainder=True)
    with hc.feed(TF_SOURCES[kind](data)) as feed:
        got = all_of(feed, 5)
    assert got["x"].dtype == dtype
    assert got["x"].reshape(-1).tolist() == got["i"].reshape(-1).tolist()
    assert got["i"].reshape(-1).tolist() == list(range(9))


def test_a_data_set_of_tensorflow_goes_on_by_its_count(tf):
    data = tf.data.Dataset.range(10).shuffle(10, seed=3, reshuffle_each_iteration=False)
    with hc.feed(data) as feed:
        first = all_of(feed, 4).tolist()
        state = feed.state()
        rest = all_of(feed, 9).tolist()
    assert state == {"epoch": 0, "item": 4}
    assert sorted(first + rest) == list(range(10))
    with hc.feed(data) as feed:
        feed.restore(state)
        assert all_of(feed, 9).tolist() == rest


def test_texts_of_tensorflow(tf):
    with pytest.raises(SpecError, match="which JAX arrays can't hold"):
        hc.feed(tf.data.Dataset.from_tensors(tf.constant("text")))


WRONG = [
    (lambda: hc.feed(3), "should be an iterable, an iterator, or a function"),
    (lambda: hc.feed([1], batch=0), "should be a number of rows, an int of 1 or more"),
    (lambda: hc.feed(iter([1]), batch=2), "has batch=, which is for arrays and tables"),
    (lambda: hc.feed(np.ones(3), batch=4), "has batch=4, and only 3 rows"),
    (lambda: hc.feed([1], prefetch=0), "prefetch= of the feed `list` should be"),
    (lambda: hc.feed([1], on_end="stop"), "should be one of 'mask', 'raise', 'repeat'"),
    (lambda: hc.feed([1], timeout=-1), "should be a number of seconds above 0"),
    (lambda: hc.feed(iter([1]), on_end="repeat"), "can be iterated only once"),
    (lambda: hc.feed(["text"]), "is a str (<U4), which JAX arrays can't hold"),
    (lambda: hc.feed(lambda a, b: 0), "or only the number of the epoch"),
    (lambda: hc.feed([None]), "have no leaves. Does the source give None?"),
]


@pytest.mark.parametrize(("make", "text"), WRONG, ids=[text for _, text in WRONG])
def test_wrong_arguments(make, text):
    with pytest.raises(SpecError) as found:
        make()
    assert text in str(found.value)


def test_an_empty_source_needs_a_spec():
    with pytest.raises(FeedError, match="gave no item, so there is none to take the"):
        hc.feed([])
    with hc.feed([], jax.ShapeDtypeStruct((2,), np.float32)) as feed:
        item, ok = feed()
        assert not ok
        assert item.tolist() == [0, 0]


class Rows:
    """A sequence, as a Dataset of PyTorch is: no IndexError tells its end."""

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return np.int32(i)


def test_a_sequence_without_an_iterator():
    with hc.feed(Rows()) as feed:
        assert all_of(feed, 7).tolist() == list(range(5))


def test_numbers_in_the_other_byte_order():
    data = np.arange(6, dtype=np.dtype(np.int32).newbyteorder())
    with hc.feed(data, batch=2) as feed:
        assert feed()[0].tolist() == [0, 1]
    spec = jax.ShapeDtypeStruct((2,), data.dtype)
    with hc.feed(lambda: iter(data.reshape(3, 2)), spec) as feed:
        assert jax.jit(feed)()[0].tolist() == [0, 1]


def test_a_class_is_a_function_that_makes_a_source():
    class Numbers:
        def __iter__(self):
            return iter(np.arange(4, dtype=np.int32))

    class Endless:
        def __iter__(self):
            return self

        def __next__(self):
            return np.int32(1)

    with hc.feed(Numbers, on_end="repeat") as feed:
        assert [int(feed()[0]) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    with hc.feed(Endless, on_end="repeat") as feed:
        assert int(feed()[0]) == 1


# --- Stress ---------------------------------------------------------------------------


def test_bursts_failures_and_resets_from_several_threads():
    rng = random.Random(0)
    pulled = []

    def items(epoch):
        for i in range(500):
            if rng.random() < 0.01:
                threading.Event().wait(0.001)
            if i == 400 and epoch % 3 == 2:
                raise ValueError(f"epoch {epoch}")
            pulled.append((epoch, i))
            yield np.array([epoch, i], np.int32)

    with hc.feed(items, prefetch=3) as feed:
        take = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed()), 0, length=50)[1])
        for epoch in range(6):
            seen: list[tuple[int, int]] = []

            def work(seen=seen):
                while True:
                    try:
                        got, oks = jax.block_until_ready(take())
                    except jax.errors.JaxRuntimeError:
                        return
                    seen.extend(map(tuple, got[np.asarray(oks)].tolist()))
                    if not oks.all():
                        return

            threads = [threading.Thread(target=work) for _ in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert len(set(seen)) == len(seen)
            assert {e for e, _ in seen} <= {epoch}
            if epoch % 3 != 2:
                assert sorted(seen) == [(epoch, i) for i in range(500)]
            feed.reset()
