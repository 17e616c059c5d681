"""`hc.feed`: the items of a loader, in compiled programs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax, _native
from hostcall._api.feed.shards import Shards
from hostcall._api.feed.sources import parse_spec, read_source, reader, spec_of
from hostcall._core import mistakes
from hostcall._core.array_values import is_array_like
from hostcall._core.callback import CallSpec
from hostcall._core.errors import SpecError, wrong
from hostcall._core.host_code import Handle
from hostcall._core.mistakes import parse_mask
from hostcall._core.option_checks import check
from hostcall._core.options import FEED, CallOptions
from hostcall._core.source import Place, name_of, users_place
from hostcall._core.spec import Opaque, Results, Template
from hostcall._engine.params.feed import FeedParams
from hostcall._jax.types import Aval
from hostcall._primitives.feed import bind
from hostcall._runtime.feeds import PATIENCE, Stream
from hostcall._runtime.opened import once
from hostcall._runtime.puller import CLOSED, Puller


class Feed(Handle):
    """The items of a source, for compiled programs. `hc.feed` makes one.

    Attributes:
        spec: the pytree of jax.ShapeDtypeStruct that describes an item.
    """

    def __init__(
        self, spec: Any, stream: Stream, items: Results, shards: Shards | None
    ) -> None:
        self.spec = spec
        self._stream = stream
        self._items = items
        self._shards = shards

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
        shards = self._shards
        # Already where the program is traced, by the line that uses the feed.
        puller.check_open()
        name = puller.name
        if rows is not None and shards is not None:
            raise SpecError(
                f"hostcall: the feed `{name}` has sharding=, and rows= wants an item"
                " for each row of a vmap. Leave out one of the two",
                code="hc-conflict",
            )
        markers = [_marker(leaf, name) for leaf in jax.tree.leaves(rows)]
        # A mask for each feed with `sharding=`: the region of its devices then gets an
        # array. XLA ends the process for one in a conditional that gets a token alone.
        if where is None and shards is not None:
            where = True
        mask = [] if where is None else [parse_mask(where, name)]
        params = self._params(count_markers=len(markers), masked=bool(mask))
        take = functools.partial(bind, params=params)
        operands = [*mask, *markers]
        *leaves, ok = take(*operands) if shards is None else shards.over(take, operands)
        return self._items.unflatten(leaves), ok

    def _params(self, count_markers: int, masked: bool) -> FeedParams:
        """The equation that takes an item, or one device's blocks of it."""
        ok_aval = _jax.ShapedArray((), np.dtype(np.bool_))
        blocks = _blocks(self._items, self._shards)
        results = Results.flat((*blocks, ok_aval), (*self._items.keys, None))
        callback = CallSpec(
            fn=Opaque(self._stream),
            template=Template.flat(*[None] * count_markers),  # plain arrays
            results=results,
            fills=(None,) * len(results.avals),
            # What a program gets depends on what was taken before.
            options=CallOptions(order="ordered"),
            place=users_place(),
        )
        return FeedParams(
            callback=callback,
            avals=results.avals,
            masked=masked,
            devices=() if self._shards is None else self._shards.devices,
        )

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
            # A library for checkpoints may give them back as NumPy's numbers.
            epoch = int(state["epoch"])
            item = int(state["item"])
        except (TypeError, KeyError, ValueError) as error:
            raise SpecError(
                f"hostcall: restore() of the feed `{self._stream.puller.name}` wants"
                f" what state() returned, a dict with 'epoch' and 'item', got {state!r}"
            ) from error
        puller = self._stream.puller
        saved = state.get("source")
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

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        puller = self._stream.puller
        return f"<hc.feed of {puller.name}, {puller.shown()}>"


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
            then a dict of columns). Only the feed's thread touches the source.
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
        A Feed. Call it in programs; its methods are `state`, `restore`, `reset` and
        `close`, and it is a context manager, which closes it.

    Raises:
        SpecError: an argument is invalid, or the first item holds no numbers.
        FeedError: the source gave no item, and there is no `spec`.
        jax.errors.JaxRuntimeError: in a program: the source failed, or an item does not
            fit `spec` (ResultError). `hc.reraise()` and `hc.errors.last_error()`
            give the exception itself. Items before it are still taken.
        FloatingPointError: an item has a NaN or infinity, and jax_debug_nans or
            jax_debug_infs is on; in a program and eagerly.

    Under transformations:
        jit, scan, fori_loop, while_loop (bodies and conditions), cond: one item each
            time it is reached, in program order across programs.
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
    is_named = hasattr(source, "__qualname__")
    name = tag or (name_of(source) if is_named else type(source).__qualname__)
    options = {"tag": tag, "prefetch": prefetch, "on_end": on_end, "timeout": timeout}
    check(f"the feed `{name}`", {**options, "batch": batch}, FEED)
    # Arrays of a program that is being traced have no values, least of all for another
    # thread.
    if not _jax.traces_nothing():
        mistakes.refuse_traced(source, _instead_of_traced)
    make, again = read_source(source, batch, name)
    if on_end == "repeat" and not again:
        raise SpecError(once(name, 'on_end="repeat" needs more'), code="hc-feed-source")
    place = users_place()
    puller = Puller(name, make, again, on_end)
    try:
        return _begin(
            puller=puller,
            spec=spec,
            sharding=sharding,
            prefetch=prefetch,
            timeout=timeout,
            place=place,
        )
    except BaseException:
        puller.close(CLOSED)  # nobody else would end its thread
        raise


def _begin(
    puller: Puller,
    spec: Any,
    sharding: Any,
    prefetch: int,
    timeout: float | None,
    place: Place,
) -> Feed:
    """Finds out what the items are, and lets the feed's thread pull ahead."""
    name = puller.name
    is_inferred = spec is None
    if is_inferred:
        spec = spec_of(puller.first(), name)  # waits for the source
    items = parse_spec(spec, name)
    read = reader(items, name, is_inferred)
    shards = None
    lanes = 1
    if sharding is not None:
        shards = Shards(sharding, items, name)
        lanes = len(shards.devices)
        read = shards.reader(read)
    # A lane of the ring has, of each item, what one device takes.
    sizes = [aval.size * aval.dtype.itemsize for aval in _blocks(items, shards)]
    ring = _native.FeedRing(leaves=sizes, lanes=lanes, capacity=prefetch)
    puller.begin(ring, read)
    source = f"{name} ({place.file}:{place.line})"
    return Feed(spec, Stream(puller, sizes, timeout, source), items, shards)


def _blocks(items: Results, shards: Shards | None) -> Sequence[Aval]:
    """What one device takes of an item: all of it, or with sharding= its part."""
    return items.avals if shards is None else shards.blocks


def _instead_of_traced(_: str, value: str) -> str:
    return (
        f"Make the feed before the program, and compute with its items and {value} in"
        " the program: item, ok = feed()"
    )


def _marker(leaf: Any, name: str) -> Any:
    """An array without elements and derivatives, that has the rows of `leaf`.

    As an operand of the equation it makes vmap batch it, and costs nothing.
    """
    if not isinstance(leaf, jax.Array) and not is_array_like(leaf):
        wanted = "an array of the vmapped function, which differs between the rows"
        advice = ". Write feed(rows=x), which takes an item for each row of x"
        raise wrong("rows", f"a call of the feed `{name}`", wanted, leaf, advice)
    if isinstance(leaf, jax.Array) and _jax.is_key_dtype(leaf.dtype):
        leaf = jax.random.key_data(leaf)  # a key can't be converted to bool
    constant = jax.lax.stop_gradient(leaf)
    return jnp.ravel(constant)[:0].astype(bool)
