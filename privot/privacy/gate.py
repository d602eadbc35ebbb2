"""The gate: code goes to the data, only sanitized values come back. Everything that may touch a sensitive record is in this file.

A query is a plain function. For `sum`, `rows` and `sorted_blocks` it sees ONE record, ``query(image, label, *public) -> tensor``, and
the gate maps it over the records with ``vmap``, so that no record can reach into another's part. For `answer` it sees a whole draw,
``query(records, *public)``. Every verb sees the records in a secret uniform order (`Gate._permutation`), never in that of their
file. For `update`, `route`, `deal` and `poll` it sees ONE shard, or what was learned from it, which stays inside;
it is mapped over the shards in the same way. The sensitivity table below is the only one in the package.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import one_hot

from privot.data.dataset import NOBODY, Records, Sensitive
from privot.errors import BudgetError, LedgerError, PlanError, QueryError, ReleaseError, refusing
from privot.privacy import shard_checkpoint
from privot.privacy.ledger import Ledger
from privot.privacy.noise import Secret, grid_for, noisy, sent
from privot.privacy.plan import Plan, Stage, Wall
from privot.privacy.sampling import ADD_REMOVE, CLIENT, LOCAL, REPLACE, Fixed, Full, Poisson, Shards
from privot.runtime import Runtime
from privot.runtime.graph_cache import Replayed
from privot.runtime.interrupts import unbroken
from privot.runtime.process_group import Alone

if TYPE_CHECKING:
    from privot.local.channels import Channel
    from privot.local.dataset import Privatized

TRITON = find_spec("triton") is not None

# privacy: how far one neighbour can move the answer, in units of its bound. A missing pair has no argument and is refused.
SENSITIVITY = {
    ("sum", ADD_REMOVE): 1.0,  # one part of norm <= C more or less
    ("sum", REPLACE): 2.0,  # one part out, another in
    (
        "rows",
        REPLACE,
    ): 2.0,  # one row changes; under add/remove the number of rows would be an answer
    ("rows", LOCAL): 2.0,
    ("answer", ADD_REMOVE): 2.0,  # the answer may change altogether, within the ball
    ("answer", REPLACE): 2.0,
    (
        "route",
        REPLACE,
    ): 2.0,  # the state of one shard may change altogether, and so its answer, within the ball
    ("poll", REPLACE): 2.0,  # one shard's part out, another in
    ("poll", CLIENT): 2.0,
    (
        "deal",
        REPLACE,
    ): 2.0,  # a row is the word of one shard of its owner; rows of other owners stay
    ("deal", CLIENT): 2.0,  # so are all rows of the owner, each within the ball: they compose
    ("sorted_blocks", REPLACE): 2.0,  # sorting telescopes: see docs/methods/gate.md
    (
        "privatize",
        LOCAL,
    ): 1.0,  # a channel's noise is scaled to its own domain: see docs/methods/channels.md
}
# privacy: the draws for which that distance also holds between a draw with the changed record and one without it, as amplification
# needs. The sums of two shards are far apart, and so are rows that moved up: without a proof, refused.
DRAWS: dict[str, tuple[type, ...]] = {
    "sum": (Full, Poisson, Fixed),
    "rows": (Full,),
    "answer": (Full, Poisson, Fixed),
    "sorted_blocks": (Full,),
    "route": (Shards,),
    "poll": (Full,),
    "deal": (Full, Shards),
    "privatize": (Full,),
}
KEPT = 64  # answers of a stage with at most so many steps are kept on disk, so that a crashed run can go on from them; of a longer one it
# goes on after the last that was marked
MARKS = 1000  # a longer stage is marked in the ledger in so many strides
# privacy: a part has at most 2^30 steps of its grid in norm. Up to so many of them a sum in float64, or in int64, is exact in any order.
EXACT = 2.0**53
MOST_SHARDS = 2**22
LARGEST_SUM = 2**32
# Verbs whose results depend on which record has which position: a resumed run needs the positions it began with.
APART = ("rows", "answer", "privatize", "route", "poll", "deal")


class Gate:
    """The only way to a `Sensitive` box. One gate serves one run of one plan.

    ``folder`` (public side) keeps the reservation's ticket and the answers, so that a crashed run can go on. ``ranks``: the processes that
    share the shards; in all but the first, which has the ledger, the folder and the secret draws, nothing is written.
    """

    def __init__(
        self,
        data: Sensitive,
        plan: Plan,
        ledger: Ledger,
        wall: Wall,
        *,
        method: str = "",
        runtime: Runtime | None = None,
        folder: Path | None = None,
        insecure_seed: int | None = None,
        ranks: Alone | None = None,
    ):
        self._ranks = ranks or Alone()
        if self._ranks.count > 1 and not (
            plan.stages and all(stage.verb in ("route", "poll") for stage in plan.stages)
        ):
            raise PlanError(
                f"{method or 'this method'} asks not of shards alone, which several processes can share: run it without torchrun"
            )
        for stage in plan.stages:
            other = (
                stage.law != "gaussian" and stage.verb != "privatize"
            )  # all other noise here is Gaussian
            if (
                other
                or (stage.verb, plan.neighbours) not in SENSITIVITY
                or type(stage.sampling) not in DRAWS[stage.verb]
            ):
                draws = f"{stage.verb} on {type(stage.sampling).__name__} draws"
                raise PlanError(
                    f"stage {stage.name}: {draws} has no proof under {plan.neighbours} neighbours"
                )
        if plan.stages and not wall.allows(plan.cost()):
            raise BudgetError(
                "the plan costs more than the budget of this run: calibrate it, or ask for a larger epsilon"
            )
        ticket = (
            int((folder / "ticket").read_text())
            if folder and (folder / "ticket").exists()
            else None
        )
        if ticket is not None and not ledger.covers(
            ticket, plan, method, seeded=insecure_seed is not None
        ):
            raise LedgerError(
                f"{ledger.path}: the unfinished run in {folder} was charged to another ledger, or for another plan"
            )
        self.spec = data.spec
        self.plan = plan
        self.ticket = ticket
        self.opened = ""
        self.insecure = insecure_seed is not None
        self._crashed = ticket is not None
        self._data = data
        self._ledger = ledger
        self._method = method
        self._folder = folder
        self._device = (runtime := runtime or Runtime()).target
        self._portion = runtime.portion
        self._secret, self._shards = Secret(insecure_seed), None  # type: tuple[Secret, tuple[Records, dict[str, Tensor]] | None]
        self._near: list[Tensor] | None = None
        self._order: Tensor | None = None
        # shards, in all processes together
        self._many = 0
        self._replayed = Replayed(self._device) if runtime.replays else None
        self._stages = {stage.name: stage for stage in plan.stages}
        lost = [
            0 if ticket is None else ledger.taken(ticket, name) for name in self._stages
        ]  # asked before a crash
        self._lost = dict(
            zip(self._stages, self._ranks.told(torch.tensor(lost))[0].tolist(), strict=True)
        )
        self._done = {
            name: 0 if _short(stage) else self._lost[name] for name, stage in self._stages.items()
        }
        self._marked = dict(self._lost)
        self._owners = self.spec.owners or 1
        dealt = (each for each in plan.stages if each.verb == "deal")
        self._dealt = {
            stage.name: torch.full((self._owners,), self._done[stage.name]) for stage in dealt
        }  # to each owner

    # The ways out

    def sum(
        self,
        name: str,
        query: Callable[..., Tensor],
        *public: Any,
        bound: float,
        per_class: bool = False,
    ) -> Tensor:
        r"""Each record's part clipped to ``bound`` in norm, then added: :math:`\sum_i clip(q(x_i,y_i))+noise`.

        ``per_class`` adds it to the row of the record's class: [classes, ...] instead of [...]; a part moves to one row only, so the
        norms stay.
        """
        stage = self._stage(name, "sum")
        if self._data._count() > LARGEST_SUM:
            raise PlanError(
                f"stage {name}: a sum of so many records is not exact in 64 bits: split the dataset"
            )
        if not self._done[name]:  # later ones are of the same kind
            self._shape(query, public)

        def total(grid: float) -> Tensor:
            # Sums of whole numbers below 2^53 are exact in any order; what may be larger is added up in 64 bits.
            kind = torch.float64 if self._data._count() * bound / grid < EXACT else torch.int64
            result = torch.zeros((), dtype=kind, device=self._device)
            groups = self.spec.classes
            for images, labels in self._draw(stage):
                parts = self._map(query, images, labels, public, stage)
                rows = (
                    one_hot(labels, groups).double().T @ _steps(parts, bound, grid)
                    if per_class
                    else _total(parts, bound, grid)
                )
                result = result + rows.to(kind)
            return result.view((*(groups,) * per_class, *parts.shape[1:]))

        return self._ask(stage, bound, total)

    def rows(self, name: str, query: Callable[..., Tensor], *public: Any, bound: float) -> Tensor:
        """Each record's part clipped to ``bound``, kept apart: [records, ...], in the secret order of this run."""
        stage = self._stage(name, "rows")
        if self.spec.size is None:
            raise PlanError(
                f"stage {name}: as many rows come back as there are records, so their number must be declared public"
            )
        shape = self._shape(query, public)

        def parts(grid: float) -> Tensor:
            rows = [
                _steps(self._map(query, *drawn, public, stage), bound, grid)
                for drawn in self._draw(stage)
            ]
            return torch.cat(rows).view(-1, *shape)

        return self._ask(stage, bound, parts)

    def answer(
        self,
        name: str,
        query: Callable[..., Tensor],
        *public: Any,
        bound: float,
        shape: tuple[int, ...],
    ) -> Tensor:
        """The whole answer of ``query(records, *public)``, of a public ``shape``, clipped once to ``bound``."""
        stage = self._stage(name, "answer")

        def whole(grid: float) -> Tensor:
            records = Records(*(torch.cat(each) for each in zip(*self._draw(stage), strict=True)))
            # an empty draw answers noise alone
            value = (
                self._secretly(query, records, *public)
                if len(records.labels)
                else torch.zeros(shape, device=self._device)
            )
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                self._close()
                raise QueryError(
                    f"stage {stage.name}: the query's answer does not have its declared shape {list(shape)}"
                )
            return _steps(value[None], bound, grid).view(shape)

        return self._ask(stage, bound, whole)

    def sorted_blocks(
        self,
        name: str,
        query: Callable[..., Tensor],
        *public: Any,
        frame: Tensor,
        blocks: int,
        radius: float,
    ) -> Tensor:
        r"""Per class and direction of ``frame`` [slices, dim]: sort the projections, average ``blocks`` runs of order statistics.

        Returns block means [classes, slices, blocks]. Records are mapped to [dim] and clipped to ``radius``; class sizes must be
        declared. Sensitivity of a block sum is :math:`2R\,\sigma_{max}(frame)`, which is :math:`2R\sqrt{k/d}` for a tight frame.
        """
        stage = self._stage(name, "sorted_blocks")
        sizes = self.spec.class_sizes
        if sizes is None or not 0 < blocks <= min(sizes):
            raise PlanError(
                f"sorted_blocks needs declared class sizes of at least {blocks} records"
            )
        if (
            not 1e-30 < radius < 1e30
            or frame.ndim != 2
            or self._shape(query, public) != frame.shape[1:]
        ):
            raise PlanError(
                f"stage {name}: a radius above 0 and a frame of shape [slices, what the query gives] are needed"
            )
        frame = frame.double().to(self._device)
        grid = grid_for(radius, radius)
        reach = radius * float(torch.linalg.matrix_norm(frame, 2)) * (1 + 1e-9)
        # privacy: rounding toward zero is monotone, so sorting still telescopes, and adds at most one grid step a slice.
        bound = reach + grid * math.sqrt(len(frame)) / 2
        if max(sizes) * bound / grid >= EXACT:
            raise PlanError(
                f"stage {name}: blocks of so many records are not exact: declare smaller classes, or a smaller frame"
            )

        def sums(_: float) -> Tensor:
            mapped = [
                (_clip(self._map(query, *drawn, public, stage), radius), drawn[1])
                for drawn in self._draw(stage)
            ]
            points, labels = (torch.cat(each) for each in zip(*mapped, strict=True))
            result = []
            for label, size in enumerate(sizes):
                run = size // blocks
                order = (
                    (points[labels == label] @ frame.T / grid).trunc_().sort(0).values
                )  # [size, slices]
                result.append(order[: run * blocks].view(blocks, run, -1).sum(1).T)
            return torch.stack(result)

        total = self._ask(stage, bound, sums, grid)
        return total / torch.tensor([size // blocks for size in sizes], device=total.device).view(
            -1, 1, 1
        )

    def split(self, count: int, state: dict[str, Tensor], most: int = 0) -> None:
        """Split the records into ``count`` shards of equal size, each with a state of its own: from ``state``, public, [count, ...] each.

        A crashed run goes on with the states it stored. The record at position p of the secret order lies in shard p mod count; up to
        count - 1 records are left over. With ``most``, a public number, shards are of one owner each, as many for every owner, and show
        that many records (`Sensitive._laid`).
        """
        owners = self._owners
        # privacy: positions are a uniform permutation, so another record in the place of one changes the shard that this one lies in and
        # no other. One record more changes the size of the shards, or their number of records left over, so none may come or go, but for
        # those of an owner who has one shard.
        if self.plan.neighbours is not REPLACE and not (
            self.plan.neighbours is CLIENT and most > 0 and count == owners
        ):
            raise PlanError(
                f"shards have no proof under {self.plan.neighbours} neighbours, unless each is all that one owner holds"
            )
        if most < 0 or (most and count % owners):
            raise PlanError(f"{count} shards of {owners} owners: as many for each are needed")
        if count > MOST_SHARDS:
            raise PlanError(
                f"{count} shards: the sum of more than {MOST_SHARDS} of them is not exact"
            )
        if (
            any(len(value) != count for value in state.values())
            or not 0 < count <= self._data._count()
        ):
            raise PlanError(
                f"{count} shards need a state each, and at least one record each: set fewer critics"
            )
        if count < self._ranks.count:
            raise PlanError(f"{count} shards are fewer than the processes of this run: start fewer")
        if not self._ranks.follows:
            self._charge()
            if self._crashed and (file := self._vault()).exists():
                state = shard_checkpoint.read(file, state)
        # privacy: nobody goes past this line before the leader has paid. By name, since a vault has an order of its own.
        state = {name: self._ranks.dealt(state[name]) for name in sorted(state)}
        size = most or self._data._count() // count
        (there,) = self._ranks.told(torch.tensor(self._data._count()))
        self._agree(
            int(there) != self._data._count(),
            "the processes of this run do not read the same records",
        )
        (order,) = self._ranks.told(
            torch.empty(int(there), dtype=torch.int64)
            if self._ranks.follows
            else self._permutation()
        )
        here = torch.arange(self._ranks.rank, count, self._ranks.count)
        places = (
            self._data._laid(here, count // owners, most, order.numpy())
            if most
            else order[here[:, None] + count * torch.arange(size)]
        )
        drawn = self._data._take(places.flatten().clamp(min=0), self._device)
        empty = sent(places.flatten() == NOBODY, self._device)
        drawn = Records(
            drawn.images.masked_fill(empty.view(-1, 1, 1, 1), 0.0),
            drawn.labels.masked_fill(empty, 0),
        )  # black images
        records = Records(
            drawn.images.unflatten(0, (len(here), size)), drawn.labels.view(len(here), size)
        )
        own = {
            name: value.detach().to(self._device).clone(memory_format=torch.contiguous_format)
            for name, value in state.items()
        }
        self._shards = (records, own)
        self._many = count
        self._replayed = self._replayed and Replayed(self._device)  # of these shards

    def update(
        self,
        query: Callable[..., dict[str, Tensor]],
        *public: Any,
        some: Tensor | None = None,
        looks: int | None = None,
    ) -> None:
        """Each shard's state becomes ``query(images, labels, state, *public)``, of all shards or of ``some``, on a public schedule.

        Nothing comes back, so it costs nothing beyond the plan. ``looks``: records of a shard that the query sees at a time, if not all.
        """
        (images, labels), state = self._split()
        places = sent(
            self._ranks.mine(torch.arange(self._many) if some is None else some), self._device
        )
        public = self._ranks.told(*public)
        each = torch.func.vmap(query, in_dims=(0, 0, 0, *(None for _ in public)))

        def lesson(part: Tensor, *public: Any) -> bool:
            known = {name: value[part] for name, value in state.items()}
            fresh = each(images[part], labels[part], known, *public)
            # privacy: a part of another shape would be broadcast, over the shards too.
            if {name: each.shape for name, each in fresh.items()} != {
                name: each.shape for name, each in known.items()
            }:
                return False
            for name, value in state.items():
                value[part] = fresh[name].detach().to(value.dtype)
            return True

        run = partial(self._replayed, lesson, query) if self._replayed else lesson
        for part in (
            places.split(max(1, self._portion // (looks or labels.shape[1]))) if len(places) else ()
        ):
            if not self._secretly(run, part, *public):
                self._close()
                raise QueryError("an update must give a state of the same names and shapes")
        self._agree()

    def route(
        self, name: str, query: Callable[..., Tensor], *public: Tensor, bound: float
    ) -> Tensor:
        """For each row of ``public`` [rows, ...] a shard, drawn secretly and for this row alone, answers ``query(state, *row)``.

        Each is clipped to ``bound``: [rows, ...]. So many answers of the stage are used up.
        """
        stage = self._stage(name, "route", rows := len(public[0]))
        _, state = self._split()
        if not isinstance(stage.sampling, Shards) or stage.sampling.count != self._many:
            raise PlanError(f"stage {name}: the plan is for another number of shards")

        def parts(grid: float) -> Tensor:
            drawn, *rest = self._ranks.told(stage.sampling.draw(rows, self._secret), *public)
            chosen, own = (
                None if each is None else sent(each, self._device)
                for each in self._ranks.asked(drawn)
            )
            known = {key: value[chosen] for key, value in state.items()}
            found = self._secretly(torch.func.vmap(query, chunk_size=self._portion), known, *rest)
            steps = _steps(found, bound, grid)
            return (steps if own is None else steps * own[:, None]).view(found.shape)

        return self._ask(stage, bound, parts, count=rows)

    def deal(
        self,
        name: str,
        query: Callable[..., Tensor],
        *public: Tensor,
        bound: float,
        some: Tensor | None = None,
    ) -> Tensor:
        """Each owner answers its own rows, [owners, rows, ...]: ``query(state, *row)`` of its shard, or of one drawn secretly for the row.

        All owners are asked, or ``some``, on a public schedule. Each row is clipped to ``bound``: [owners, rows, ...]. So many answers of
        the stage are used up for each who was asked: the plan is that of one owner.
        """
        everyone = torch.arange(self._owners)
        asked = everyone if some is None else some.cpu()
        (many, rows) = public[0].shape[:2]
        if (
            not many
            or len(asked.unique()) != many
            or not 0 <= asked.min() <= asked.max() < len(everyone)
        ):
            raise PlanError(
                f"stage {name}: rows for each owner that is asked, once each, are needed"
            )
        dealt = self._dealt.get(name, everyone)
        stage = self._stage(name, "deal", rows, done := int(dealt[asked].max()))
        _, state = self._split()
        shards = stage.sampling if isinstance(stage.sampling, Shards) else None
        if self._many != (shards.count if shards else 1) * len(everyone):
            raise PlanError(f"stage {name}: the plan is for another number of shards")

        def drawn(own: dict[str, Tensor], which: Tensor, *row: Tensor) -> Tensor:
            return query({key: value[which[None]][0] for key, value in own.items()}, *row)

        def words(grid: float) -> Tensor:
            known = state
            given = public
            word = query
            if shards:
                given = (
                    sent(shards.draw(many * rows, self._secret).view(many, rows), self._device),
                    *public,
                )
                known = {
                    key: value.unflatten(0, (-1, shards.count)) for key, value in state.items()
                }
                word = drawn
            known = (
                known
                if some is None
                else {key: value[sent(asked, self._device)] for key, value in known.items()}
            )
            each = torch.func.vmap(word, in_dims=(None, *(0 for _ in given)))
            found = self._secretly(
                torch.func.vmap(each, chunk_size=max(1, self._portion // rows)), known, *given
            )
            return _steps(found.flatten(0, 1), bound, grid).view(found.shape)

        value = self._ask(stage, bound, words, count=rows, step=done)
        dealt[asked] += rows
        return value

    def poll(self, name: str, query: Callable[..., Tensor], *public: Any, bound: float) -> Tensor:
        """The sum over all shards of ``query(state, *public)``, each clipped to ``bound``."""
        stage = self._stage(name, "poll")
        _, state = self._split()

        def total(grid: float) -> Tensor:
            each = torch.func.vmap(
                query, in_dims=(0, *(None for _ in public)), chunk_size=self._portion
            )
            found = self._secretly(each, state, *self._ranks.told(*public))
            return _steps(found, bound, grid).sum(0).view(found.shape[1:])

        return self._ask(stage, bound, total)

    def store(self) -> None:
        """Keep the shards' states on the secret side, beside the ledger, so that a crashed run can go on; `forget` removes them."""
        _, state = self._split()
        if self._ranks.told(torch.tensor(self._folder is not None))[
            0
        ]:  # else no run could go on from here
            whole = {name: self._ranks.gathered(value, self._many) for name, value in state.items()}
            if not self._ranks.follows:
                shard_checkpoint.write(self._vault(), whole)

    def forget(self) -> None:
        """Remove what `store` kept, and the secret order of the records."""
        if self.ticket is not None:
            shard_checkpoint.remove(self._vault())
            shard_checkpoint.remove(shard_checkpoint.order_file(self._ledger, self.ticket))
        self._shards = None

    def privatize(self, channel: Channel) -> Tensor:
        """Each record alone through a channel, which clips it and adds its own noise: [records, width]. The whole plan is used up."""
        stages = [self._stage(stage.name, "privatize") for stage in self.plan.stages]
        if channel.plan() != self.plan or channel.columns - self.spec.pixels not in (
            0,
            1,
        ):  # the last column may be the label
            raise PlanError(
                "the plan is not that of this channel, or the channel is for records of another shape"
            )
        if self.spec.size is None:
            raise PlanError(
                "as many answers come back as there are records, so their number must be declared public"
            )
        ticket = self._charge()
        self._permutation()
        for stage in stages:
            self._mark(ticket, stage, 0, 1)
        parts = (
            torch.cat([images.flatten(1), labels[:, None]], 1)[:, : channel.columns]
            for images, labels in self._draw(stages[0])
        )
        value = torch.cat(
            [self._secretly(channel.privatize, each.cpu(), self._secret) for each in parts]
        )
        for stage in stages:
            self._keep(ticket, stage, 0, value)
            self._done[stage.name] = 1
        return value

    def privatized(self) -> Privatized:
        """What clients sent, on a server; here there are records, which are not handed out."""
        raise PlanError(
            "this method learns from privatized records alone: make them with privot privatize, then give it that file"
        )

    def left(self, name: str) -> int:
        """How many answers of a stage can still be asked for. Those lost in a crash are gone."""
        return self._stages[name].steps - self._done[name]

    def open(self, reason: str) -> Records:
        """All records, for a method without a mechanism. From here on the release says ``NoGuarantee(reason)``, for good.

        The ledger is charged an infinite epsilon, so an owner's wall refuses it.
        """
        if self._ranks.count > 1:
            raise PlanError("records do not go to several processes: run it without torchrun")
        self._ledger.reserve(
            Plan((Stage("open", "answer", 0.0),), self.plan.neighbours), self._method
        )
        self.opened = reason
        return self._data._take(slice(None), self._device)

    # How an answer comes about

    def _stage(self, name: str, verb: str, count: int = 1, done: int | None = None) -> Stage:
        stage = self._stages.get(name)
        if stage is None or stage.verb != verb:
            raise PlanError(f"the plan has no stage {name!r} of {verb}")
        if not 0 < count <= (self.left(name) if done is None else stage.steps - done):
            raise BudgetError(f"stage {name} is used up: its plan has {stage.steps} step(s)")
        return stage

    def _charge(self) -> int:
        """The whole plan is paid for before the first record is read."""
        if self.ticket is None:
            # privacy: seeded noise can be subtracted by anyone, so such a run is charged as infinite.
            self.ticket = self._ledger.reserve(
                self.plan, self._method, seeded=self.insecure, owners=self._owners
            )
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
                (part := self._folder / "ticket.part").write_text(str(self.ticket))
                part.replace(self._folder / "ticket")
        return self.ticket

    def _ask(
        self,
        stage: Stage,
        bound: float,
        mechanism: Callable[[float], Tensor],
        grid: float | None = None,
        count: int = 1,
        step: int | None = None,
    ) -> Tensor:
        """Reserve, mark, compute (in steps of the grid), add noise, keep, commit: in this order, so that a crash can only over-charge."""
        if (
            not 1e-30 < bound < 1e30
        ):  # squares, of which norms are made, must neither vanish nor overflow
            raise PlanError(f"stage {stage.name}: bound={bound}: a finite number above 0 is needed")
        step = self._done[stage.name] if step is None else step
        if kept := self._ranks.shared(self._kept(stage, step)):
            value = kept["value"].to(self._device)
        else:
            noise_std = stage.noise * SENSITIVITY[stage.verb, self.plan.neighbours] * bound
            grid = grid or grid_for(bound, noise_std)
            if self._ranks.follows:
                value = self._summed(mechanism(grid))
            else:
                ticket = self._charge()
                self._permutation()  # on disk before anything depends on it
                with unbroken():
                    self._mark(ticket, stage, step, count)
                    value = noisy(self._summed(mechanism(grid)), noise_std, grid, self._secret)
                    self._keep(ticket, stage, step, value)
            (value,) = self._ranks.told(value)
        self._done[stage.name] = max(self._done[stage.name], step + count)
        return value

    def _mark(self, ticket: int, stage: Stage, step: int, count: int) -> None:
        """The ledger knows of answers before they are computed."""
        if step < self._lost[stage.name]:
            raise BudgetError(
                "a crash lost an answer that is paid for, and none is given twice: start anew, at a new charge"
            )
        if stage.verb != "deal":  # else owners are asked in turn
            self._lost[stage.name] = (
                step + count
            )  # privacy: whoever asks again after an error gets no second one
        if step + count > (
            marked := self._marked[stage.name]
        ):  # part of them may lie in the last stride
            stride = (
                stage.steps // MARKS * (stage.verb != "deal")
            )  # an owner's process may end after any message
            last = min(max(step + count, marked + stride), stage.steps) - 1
            self._ledger.ask(ticket, stage.name, marked, last)
            self._marked[stage.name] = last + 1

    def _summed(self, part: Tensor) -> Tensor:
        """The parts of all processes, at the leader."""
        self._agree()
        return self._ranks.total(part)

    def _file(self, stage: Stage, step: int) -> Path | None:
        return (
            self._folder / f"{stage.name}-{step}.safetensors"
            if self._folder and _short(stage)
            else None
        )

    def _keep(self, ticket: int, stage: Stage, step: int, value: Tensor) -> None:
        """Answers are public: one may lie on disk, whole or not at all, and the ledger knows its digest."""
        file = self._file(stage, step)
        if file:
            (part := file.with_suffix(".part")).write_bytes(
                save({"value": value.contiguous().cpu()})
            )  # its errors are those of a disk
            part.replace(file)
        if _short(stage):
            self._ledger.commit(ticket, stage.name, step, _digest(value))

    def _kept(self, stage: Stage, step: int) -> dict[str, Tensor] | None:
        file = self._file(stage, step)
        if self.ticket is None or file is None or not file.exists():
            return None
        with refusing(
            ReleaseError,
            altered := f"{file}: this kept answer was altered; start anew, at a new charge",
        ):
            value = load_file(file)["value"]
        if self._ledger.digest(self.ticket, stage.name, step) not in (None, _digest(value)):
            raise ReleaseError(altered)
        self._ledger.commit(self.ticket, stage.name, step, _digest(value))
        return {"value": value}

    # The secret side

    def _split(self) -> tuple[Records, dict[str, Tensor]]:
        if self._shards is None:
            raise PlanError("the records are not split into shards")
        return self._shards

    def _vault(self) -> Path:
        return shard_checkpoint.place(self._ledger, self.ticket)

    def _permutation(self) -> Tensor:
        """Give the records' secret order: record ``order[p]`` has position p, for all of this run.

        privacy: the order in which a reader finds records depends on their content (class folders, names of files). A uniform permutation
        that is independent of everything makes the records exchangeable: see docs/methods/gate.md. It is drawn once a run and, where the
        run can be resumed and records are kept apart, stored beside the ledger before anything depends on it.

        Returns:
            int64 [records].
        """
        if self._order is None:
            count = self._data._count()
            kept = (
                any(stage.verb in APART for stage in self.plan.stages) and self._folder is not None
            )
            file = shard_checkpoint.order_file(self._ledger, self.ticket) if kept else None
            if file and self._crashed and file.exists():
                self._order = shard_checkpoint.read(
                    file, {"order": torch.empty(count, dtype=torch.int64)}
                )["order"]
            elif file and self._crashed and (any(self._lost.values()) or self._vault().exists()):
                raise ReleaseError(
                    f"{file}: the secret order of a crashed run's records is missing: start anew, at a new charge"
                )
            else:
                self._order = self._secret.order(count)
                if file:
                    shard_checkpoint.write(file, {"order": self._order})
        return self._order

    def _draw(self, stage: Stage) -> Iterator[Records]:
        """The drawn records in portions, at least one of them (it may be empty)."""
        count = self._data._count()
        chosen = stage.sampling.draw(count, self._secret)
        total = count if chosen is None else len(chosen)
        for start in range(0, max(total, 1), self._portion):
            part = slice(start, min(start + self._portion, total))
            yield self._taken(part if chosen is None else chosen[part])

    def _taken(self, where: slice | Tensor) -> Records:
        """Records by their positions, on the device; where all of them fit into a quarter of a GPU's memory, they come there once."""
        if self._near is None:
            self._near = (
                self._data._near(self._device, self._permutation().numpy())
                if self._device.type == "cuda"
                else []
            )
        if not self._near:
            return self._data._take(self._permutation()[where], self._device)
        places = sent(where, self._device) if isinstance(where, Tensor) else where
        images, labels = (each[places] for each in self._near)
        return Records(images / 255 if images.dtype == torch.uint8 else images, labels)

    def _map(
        self,
        query: Callable[..., Tensor],
        images: Tensor,
        labels: Tensor,
        public: tuple[Any, ...],
        stage: Stage,
    ) -> Tensor:
        """The query on each record alone: [records, ...]."""
        count = len(labels)
        if self.plan.neighbours is ADD_REMOVE or (
            isinstance(stage.sampling, Fixed) and stage.sampling.drawn > self._portion
        ):
            # privacy: float32 is rounded by the shape of a batch, so a portion is filled up with black images: no record may
            # change how the others are rounded, neither by being there nor by moving another one into the last, shorter portion.
            room = self._portion - count
            images, labels = (
                torch.cat([each, each.new_zeros(room, *each.shape[1:])])
                for each in (images, labels)
            )
        each = torch.func.vmap(query, in_dims=(0, 0, *(None for _ in public)))
        parts: Tensor = self._secretly(each, images, labels, *public)
        return parts[:count]

    def _shape(self, query: Callable[..., Tensor], public: tuple[Any, ...]) -> tuple[int, ...]:
        """What the query gives for one black image: a public record, so its errors may speak, and come before any charge."""
        image = torch.zeros(1, *self.spec.shape, device=self._device)
        label = torch.zeros(1, dtype=torch.int64, device=self._device)
        return tuple(
            torch.func.vmap(query, in_dims=(0, 0, *(None for _ in public)))(
                image, label, *public
            ).shape[1:]
        )

    def _agree(
        self,
        failed: bool = False,
        why: str = "a query failed on the secret side of another process; try it on public data",
    ) -> None:
        """Where several processes share the shards, all stop when one has failed."""
        if self._ranks.failed(failed):
            self._close(told=True)
            raise QueryError(why)

    def _close(self, told: bool = False) -> None:
        """After a failure, of which other processes must hear unless they were ``told``."""
        self._stages.clear()  # privacy: that it failed may say something of the records; it says it once, then this gate is closed
        if not told:
            self._ranks.failed(True)

    def _secretly(self, query: Callable[..., Any], *args: Any) -> Any:
        if self.plan.stages and not self._stages:
            raise PlanError("this gate is closed: a query has failed")
        try:
            # privacy: cuDNN must not choose its way by timing records, nor sum in an order of its own: a part depends on its record alone.
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
                return query(*args)
        except Exception as error:
            kind = type(error).__name__
        self._close()
        # privacy: the text of an error can carry records, so it is not even this one's context; its type is public knowledge of the code.
        way = (
            "ask for fewer records at a time (microbatch)"
            if kind in ("OutOfMemoryError", "MemoryError")
            else "try it on public data"
        )
        raise QueryError(f"a query failed on the secret side with {kind}; {way}")


def _short(stage: Stage) -> bool:
    """Whether answers are kept; of owners dealt to in turn, step numbers would not tell them apart."""
    return stage.steps <= KEPT and stage.verb != "deal"


def _factor(parts: Tensor, bound: float, unit: float) -> Tensor:
    """What brings each row [rows, numbers] to norm <= bound, in units of a power of two: float64 [rows], 0 for a row that is not finite."""
    norms = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64)
    scale = torch.where(norms > bound * (1 - 1e-12), bound * (1 - 1e-12) / norms, 1.0)
    return torch.where(norms.isfinite(), scale / unit, 0.0)


def _clip(parts: Tensor, bound: float, unit: float = 1.0) -> Tensor:
    """Rows scaled to norm <= bound, in units of a power of two, float64; a row that is not finite becomes zero: [rows, numbers]."""
    parts = _flat(parts)
    factor = _factor(parts, bound, unit)[:, None]
    # The factor is float64, and so is the product: parts are never copied as float64 on the way, which would take twice their memory.
    return torch.where(factor != 0, parts, 0.0) * factor


def _steps(parts: Tensor, bound: float, grid: float) -> Tensor:
    """Rows clipped to the bound, in whole steps of the grid: rounded toward zero, so none gets longer: [rows, numbers]."""
    return _clip(parts, bound, grid).trunc_()


def _total(parts: Tensor, bound: float, grid: float) -> Tensor:
    """The sum of `_steps` over the rows: [numbers]."""
    if not (parts.is_cuda and TRITON and parts.dtype == torch.float32):
        return _steps(parts, bound, grid).sum(0)
    from privot.privacy.kernels.clipped_sum import steps_summed

    return steps_summed(flat := _flat(parts), _factor(flat, bound, grid))


def _flat(parts: Tensor) -> Tensor:
    return parts.detach().reshape(len(parts), math.prod(parts.shape[1:]))


def _digest(value: Tensor) -> str:
    return hashlib.sha256(value.contiguous().cpu().numpy().tobytes()).hexdigest()
