"""`hc.feed`: the items of a loader, in compiled programs."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax, _native
from hostcall._api.call import call
from hostcall._api.feed import checks
from hostcall._api.feed.indexed import Indexed
from hostcall._api.feed.items import parse_spec, reader, spec_of
from hostcall._api.feed.shards import Shards
from hostcall._api.feed.sources import read_source
from hostcall._core.arguments import check_tag, parse_mask
from hostcall._core.errors import SpecError
from hostcall._core.host_code import Handle
from hostcall._core.source import name_of, users_place
from hostcall._core.spec import Results, Static, Template
from hostcall._engine.params.call import Callback
from hostcall._engine.params.feed import FeedParams
from hostcall._primitives.feed import lowering  # noqa: F401  (registers)
from hostcall._primitives.feed.primitive import bind
from hostcall._runtime.feed_puller import Puller
from hostcall._runtime.feed_texts import CLOSED
from hostcall._runtime.feeds import PATIENCE, Stream


class Feed(Handle):
    """The items of a source, for compiled programs. `hc.feed` makes one.

    Attributes:
        spec: the pytree of jax.ShapeDtypeStruct that describes an item.
    """

    def __init__(
        self,
        source: Any,
        spec: Any,
        *,
        batch: int | None,
        prefetch: int,
        on_end: str,
        timeout: float | None,
        sharding: Any,
        tag: str | None,
    ) -> None:
        name = tag or _name(source)
        check_tag(tag, name)
        checks.check_options(name, prefetch, on_end, timeout)
        checks.refuse_traced(source)
        given = read_source(source, batch, name)
        if on_end == "repeat" and not given.again:
            raise SpecError(
                f'hostcall: the feed `{name}` has on_end="repeat", and its source is an'
                " iterator, which can be iterated only once. Give a function that"
                " returns a new iterator, hc.feed(lambda: make_iterator())",
                code="hc-feed-source",
            )
        self._place = users_place()
        puller = Puller(name, given, on_end)
        try:
            self.spec = spec_of(puller.first(), name) if spec is None else spec
            items = parse_spec(self.spec, name)
            read = reader(items, name, spec is None)
            shards = None if sharding is None else Shards(sharding, items, name)
            blocks = items.avals if shards is None else shards.blocks
            sizes = [_bytes(aval) for aval in blocks]
            ring = _native.FeedRing(
                leaves=sizes,
                lanes=1 if shards is None else len(shards.devices),
                capacity=prefetch,
            )
        except BaseException:
            puller.close(CLOSED)
            raise
        where = f"{name} ({self._place.file}:{self._place.line})"
        self._stream = Stream(puller, ring, sizes, timeout, where)
        self._indexed = given.get and Indexed(given, read, items.avals, prefetch, name)
        self._items, self._shards, self._blocks = items, shards, tuple(blocks)
        puller.begin(ring, read if shards is None else shards.cut(read))

    def _held(self) -> Stream:
        """What programs hold of it."""
        return self._stream

    def __call__(self, *, rows: Any = None, where: Any = None) -> tuple[Any, jax.Array]:
        """The next item, and whether there was one.

        Args:
            rows: under vmap, takes an item for each row if this depends on the row: any
                array, or pytree of arrays, of the vmapped function. Its values are not
                used. Without it one item serves all rows.
            where: a bool scalar. If it is False, no item is taken, and the result is
                zeros and False.

        Returns:
            (item, ok): a pytree like `spec`, and a bool scalar. At the end of the items
            `ok` is False and the item zeros, if on_end="mask".
        """
        puller = self._stream.puller
        puller.check_open()
        name = puller.name
        if rows is not None and self._shards is not None:
            raise SpecError(
                f"hostcall: the feed `{name}` has sharding=, and rows= wants an item"
                " for each row of a vmap. Leave out one of the two",
                code="hc-conflict",
            )
        operands = [checks.marker(leaf, name) for leaf in jax.tree.leaves(rows)]
        masked = where is not None
        if masked:
            operands.insert(0, parse_mask(where, name))
        count = len(operands) - masked
        results = Results.flat(
            (*self._blocks, _jax.ShapedArray((), np.dtype(np.bool_))),
            (*self._items.keys, None),
        )
        callback = Callback(
            fn=Static(self._stream),
            template=Template.flat(*(None,) * count),
            results=results,
            fills=(None,) * len(results.avals),
            tag=None,
            place=users_place(),
        )
        params = FeedParams(
            callback=callback,
            avals=results.avals,
            order="ordered",
            vmap_method="sequential",
            sharding=None,
            masked=masked,
            devices=() if self._shards is None else self._shards.devices,
        )
        if self._shards is None:
            *leaves, ok = bind(*operands, params=params)
        else:
            take = functools.partial(bind, params=params)
            *leaves, ok = self._shards.over(take, operands)
        return self._items.fill(leaves), ok

    def at(self, i: Any) -> Any:
        """The item of number `i`, from a source with `__getitem__`; a pure read.

        It takes nothing from the stream. Numbers with a constant stride are read ahead,
        and up to 64 MiB of items are kept, the least recently used going first.

        Args:
            i: an int scalar, from 0.

        Raises:
            SpecError: the source has no `__getitem__`, the feed has `sharding=`, or `i`
                is no int scalar.
            IndexError: there is no such item, or `i` is negative; in a program, as a
                JaxRuntimeError.

        Under transformations:
            vmap: all rows are read in one call.
            grad: a constant. remat may read an item again.
            jit: JAX may drop, merge or repeat the read, as for a pure `hc.call`.
        """
        name = self._stream.puller.name
        if self._indexed is None or self._shards is not None:
            why = "its source has no items by number"
            raise SpecError(
                f"hostcall: feed.at(i) of `{name}`:"
                f" {why if self._indexed is None else 'it has sharding='}. It is for"
                " sequences, and for arrays and tables with batch=",
                code="hc-feed-source",
            )
        if jnp.shape(i) != () or not jnp.issubdtype(jnp.result_type(i), jnp.integer):
            raise SpecError(
                f"hostcall: feed.at(i) of the feed `{name}` wants an int scalar, got"
                f" {jnp.result_type(i)}{list(jnp.shape(i))}. Under jax.vmap, i is a"
                " scalar for each row"
            )
        spec = tuple(
            jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self._items.avals
        )
        leaves = call(
            self._indexed,
            spec,
            jnp.asarray(i, int),
            vmap_method="expand_dims",
            tag=self._indexed.__qualname__,
        )
        return self._items.fill(leaves)

    def state(self) -> dict[str, Any]:
        """The position after the last item that a program took.

        Whatever has been pulled ahead does not count. Wait for the programs first
        (jax.block_until_ready), or the position is that of some step on the way.

        Returns:
            {"epoch": int, "item": int}, with the source's own state under "source" if
            it has one (get_state, state_dict).
        """
        return self._stream.puller.position()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on behind the item after which `state()` was called.

        A source with a state of its own gets it back (set_state, load_state_dict). Any
        other is iterated from the start of the epoch, and as many items are skipped; an
        iterator, which can't be started again, is only skipped forwards. Waits for the
        source meanwhile.

        Raises:
            SpecError: this is no state of a feed.
            FeedError: the source can't go to this position, or the feed is closed.
        """
        try:
            epoch, item = int(state["epoch"]), int(state["item"])
        except (TypeError, KeyError, ValueError) as error:
            raise SpecError(
                f"hostcall: restore() of the feed `{self._stream.puller.name}` wants"
                f" what state() returned, a dict with 'epoch' and 'item', got {state!r}"
            ) from error
        puller, saved = self._stream.puller, state.get("source")
        puller.ask(lambda: puller.restore(epoch, item, saved))

    def reset(self) -> None:
        """Starts the next epoch: items that were pulled ahead are dropped, and the
        source is iterated again from its start.

        Raises:
            FeedError: the source is an iterator, or the feed is closed.
        """
        puller = self._stream.puller
        puller.ask(puller.reset)

    def close(self) -> None:
        """Ends the feed's thread. Nothing is pulled after this.

        A program that wants an item then fails with a FeedError. If the source is in
        the middle of an item, close() waits for it, but at most for a second.
        """
        self._stream.puller.close(CLOSED, PATIENCE)
        if self._indexed is not None:
            self._indexed.close(CLOSED)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        puller = self._stream.puller
        return f"<hc.feed of {puller.name}, {puller.state()}>"


def feed(
    source: Any,
    spec: Any = None,
    *,
    batch: int | None = None,
    prefetch: int = 4,
    on_end: Literal["mask", "raise", "repeat"] = "mask",
    timeout: float | None = None,
    sharding: jax.sharding.Sharding | None = None,
    tag: str | None = None,
) -> Feed:
    """Brings the items of an iterator or data loader into compiled programs.

    `batch, ok = feed()` in a compiled program takes the next item. A thread of the
    feed's own pulls items ahead, so that the device waits only if the source is slower
    than the program.

    Args:
        source: an iterable, an iterator, or a function that returns one, such as
            PyTorch's or grain's DataLoader or a tf.data.Dataset. A function that
            requires an argument gets the number of the epoch, from 0. With `batch=`: an
            array, a pytree of arrays, a pandas.DataFrame or a pyarrow.Table (an item is
            then a dict of columns). Only the feed's thread
            touches the source; with `at` others do too, one at a time.
        spec: describes an item: a pytree of jax.ShapeDtypeStruct. None takes it from
            the first item, for which this waits.
        batch: cuts arrays and tables into items of so many rows. Rows at the end that
            do not fill an item are left out.
        prefetch: how many items are pulled ahead, and so how many are in memory.
        on_end: what a program gets after the last item. "mask": zeros, and `ok` is
            False. "raise": it fails with a FeedEndError. "repeat": the next epoch;
            the source is iterated again, which must not be an iterator.
        timeout: a limit in seconds. If a program waits longer for an item, it fails
            with a FeedError that says where the source is.
        sharding: a jax.NamedSharding. Each leaf of an item is then an array with this
            sharding: each device takes its block from its process, without
            communication. The source gives the part of its own process, as for
            jax.make_array_from_process_local_data, and `spec` describes that part.
        tag: the name in messages, `hc.monitor.stats()` and `feeds()`. Default: the
            name of the source, or of its type.

    Returns:
        A Feed. Call it in programs; its methods are `at`, `state`, `restore`, `reset`
        and `close`, and it is a context manager, which closes it.

    Raises:
        SpecError: an argument is invalid, or the first item holds no numbers.
        FeedError: the source gave no item, and there is no `spec`.
        jax.errors.JaxRuntimeError: in a program: the source failed, or an item does not
            fit `spec` (ResultError). `hc.reraise()` and `hc.errors.last_error()`
            give the exception itself. Items before it are still taken.

    Under transformations:
        jit, scan, fori_loop, while_loop (bodies and conditions), cond: one item each
            time it is reached, in program order across programs. With `sharding=`, use
            `feed(where=p)` instead of cond, in which XLA ends the process.
        vmap: one item for all rows; one for each row, in row order, with `rows=`.
        grad: a constant. Nothing is pulled again, also not by remat.
        linearize: a while_loop with a feed is refused (DerivativeError), since JAX
            would run it twice, with other items the second time. Use scan, with
            `where=` for steps that take none, or jax.jvp.
        jit over sharded arrays: one item, for all devices; with `sharding=`, its
            block for each device. `ok` is then agreed over the processes.
        shard_map: one item for each device, in the order in which they come.
        jax.export, hc.export: the feed must be registered (`hc.register`) in each
            process; one with `sharding=` stays.

    Cost: 0.3 us and one copy of the item, without Python, if an item is ready. An item
        costs the feed's thread one more copy, and its check. A program with a feed is
        dispatched like one with ordered calls.
    """
    return Feed(
        source,
        spec,
        batch=batch,
        prefetch=prefetch,
        on_end=on_end,
        timeout=timeout,
        sharding=sharding,
        tag=tag,
    )


def _name(source: Any) -> str:
    named = getattr(source, "__qualname__", None)
    return name_of(source) if named is not None else type(source).__qualname__


def _bytes(aval: Any) -> int:
    return int(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize)
