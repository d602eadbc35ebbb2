"""The server: a generator, a public schedule, and no trust in whoever answers. It never sees a record, a critic or a loss.

A round is `ask`, then `take` for whatever comes, then `close`, which takes a step with those who answered in time. Owners weigh the same,
whatever they say. The first lie ends an owner's part in the run; who is silent or late is only passed over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privot.components.server_generator import Drawing
from privot.errors import MessageError, PlanError, ReleaseError, SettingError, refusing
from privot.federated.messages import Answer, Message, Refusal, Request, Terms, pack, unpack
from privot.federated.transcript import Recorder
from privot.federated.validation import longest_message, sound
from privot.io import put
from privot.progress import jsonable
from privot.release import Guarantee, NoGuarantee, Release
from privot.runtime import Progress, Streams, silent
from privot.synthesis import versions

PATIENCE = 3  # refusals of an owner, after which it is left in peace

OFFERED = "offered"
AGREED = "agreed"
GONE = "gone"


@dataclass(frozen=True)
class Offence:
    """What an owner did that it should not, or did not do; ``lie``: it takes no further part."""

    name: str
    round: int  # -1: when it was asked for its consent
    reason: str
    lie: bool = True


class Server:
    """One run with the owners ``names``, whose order is public. With a ``folder`` it goes on after a crash, in the round where it was.

    ``record``: where every message is written down that it sent or saw. ``progress`` hears of what comes before the first message.
    """

    def __init__(
        self,
        terms: Terms,
        names: Sequence[str],
        streams: Streams,
        folder: Path | None = None,
        record: Path | None = None,
        progress: Progress = silent,
    ):
        if len(set(names)) != len(names) or len(names) != terms.owners:
            raise SettingError(
                f"the terms are for {terms.owners} owners, each with a name of its own, and {len(set(names))} are named"
            )
        self.terms, self.names, self.offences = terms, tuple(names), []  # type: Terms, tuple[str, ...], list[Offence]
        # rounds closed, and answers that counted
        self.round = 0
        self.taken = 0
        self._offer = pack(terms)
        self._folder = folder
        self._room = longest_message(terms)  # bytes of anything that is read or kept
        self._streams = dataclasses.replace(streams, folder=folder)
        self._state = dict.fromkeys(names, OFFERED)
        self._refused = dict.fromkeys(names, 0)
        self._asked: dict[str, int] = {}  # in the open round: name to its row in what was drawn
        self._images = torch.empty(0)
        self._answers: dict[str, tuple[bytes, Tensor]] = {}
        self._missed: set[tuple[str, int]] = (
            set()
        )  # rounds in which an owner was asked and did not answer: it may be late
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._drawing = Drawing(terms.settings, terms.spec, self._streams, progress)
        if folder is not None:
            self._resume(folder)
        self._record = Recorder(record) if record is not None else None
        self._release: Release | None = None

    # Consent

    def offers(self) -> dict[str, bytes]:
        """The terms, for all who have not said yes or no."""
        return self._sent(
            {name: self._offer for name, state in self._state.items() if state == OFFERED}
        )

    def accept(self, name: str, raw: bytes) -> Offence | None:
        """What an owner says to the terms: the same bytes, or a refusal. Gives back what was wrong with it, if anything."""
        return self._heard(name, raw, -1, self._agreed)

    def _agreed(self, name: str, raw: bytes, message: Message) -> None:
        if isinstance(message, Refusal):
            self._state[name] = GONE
            raise _Passed(f"refused the terms: {message.reason}")
        if not isinstance(message, Terms) or raw != self._offer:
            raise MessageError("agreed to something else than the terms")
        self._state[name] = AGREED

    # Rounds

    @property
    def living(self) -> list[str]:
        """Owners that agreed and have not gone."""
        return [name for name in self.names if self._state[name] == AGREED]

    @property
    def done(self) -> bool:
        """Whether all rounds are over, or nobody is left who could answer."""
        return self.round >= self.terms.settings.rounds or all(
            state == GONE for state in self._state.values()
        )

    def ask(self) -> dict[str, bytes]:
        """Requests of this round for those of its owners who are there and have not answered yet; asked again, it gives the same bytes."""
        if self.done:
            raise PlanError("the run is over: there is no round left to ask in")
        if not self._asked:
            self._draw()
        waiting = [
            name
            for name in self._asked
            if name not in self._answers and self._state[name] == AGREED
        ]
        return self._sent(
            {
                name: pack(Request(self.terms.run, self.round, self._images[self._asked[name]]))
                for name in waiting
            }
        )

    def take(self, name: str, raw: bytes) -> Offence | None:
        """What came from an owner in a round. Gives back what was wrong with it, if anything; it is then in `offences`, too."""
        return self._heard(name, raw, self.round, self._counted)

    def close(self) -> None:
        """End the round: one step with the answers that are there, if any; who was asked and silent is named."""
        answered = torch.tensor([name in self._answers for name in self._asked], dtype=torch.bool)
        for name in self._asked:
            if name not in self._answers and self._state[name] == AGREED:
                self._missed.add((name, self.round))
                self.offences.append(Offence(name, self.round, "did not answer in time", lie=False))
        if answered.any():
            first = next(iter(self._answers.values()))[1]
            values = torch.stack(
                [
                    self._answers[name][1] if name in self._answers else torch.zeros_like(first)
                    for name in self._asked
                ]
            )
            self._drawing.take(values.to(self._streams.runtime.target), answered)
            self.taken += int(answered.sum())
        self.round += 1
        self._asked = {}
        self._answers = {}
        self._images = torch.empty(0)
        self._keep()

    def finish(self, delta: float = 1e-5) -> Release:
        """The generator with what its owners' plan proves of each of them; refused if nobody has ever answered."""
        if not self.done:
            raise PlanError(
                f"the run is in round {self.round} of {self.terms.settings.rounds}: close the others first"
            )
        if not self.taken:
            raise ReleaseError("no owner has answered in any round: there is nothing to release")
        if self._release is not None:
            return self._release
        if self._record:
            self._record.close()
            self._record = None
        product = self._drawing.product()
        plan = self.terms.plan()
        if not product.fits(self.terms.spec):
            raise ReleaseError(
                "what was made has values that are not finite: its training diverged"
            )
        facts: dict[str, Any] = {
            **product.facts,
            "method": self.terms.settings.name,
            "settings": dataclasses.asdict(self.terms.settings),
            "plan": plan.to_json(),
            "event": str(plan.event()),
            "data": "",
            "seed": self._streams.seed,
            "run": self.terms.run,
            "rounds": self.round,
            "answers": self.taken,
            "versions": versions(),
        }
        noise = min(stage.noise for stage in plan.stages)
        claim = Guarantee.of(plan, delta) if noise > 0 else NoGuarantee("no noise was added")
        self._release = Release(product, claim, self.terms.spec, jsonable(facts))
        return self._release

    # What came

    def _heard(self, name: str, raw: bytes, number: int, use: Any) -> Offence | None:
        """Anything may come from anyone: what is no use is named, and a liar's further words are not even read."""
        if self._record and isinstance(raw, bytes):
            self._record.seen(
                name, raw if len(raw) <= self._room else b""
            )  # no stranger fills this disk
        if self._state.get(name, GONE) == GONE:
            return Offence(name, number, "takes no part in this run")
        try:
            message = unpack(raw, self._room)
            if message.run != self.terms.run and not (
                isinstance(message, Refusal) and set(message.run) == {"0"}
            ):
                raise MessageError("a message of another run")
            use(name, raw, message)
        except _Passed as passed:
            offence = Offence(name, number, str(passed), lie=False)
        except MessageError as error:
            offence = Offence(name, number, str(error))
            self._state[name] = GONE
            self._answers.pop(name, None)  # of whoever lies, nothing counts in this round
        else:
            return None
        self.offences.append(offence)
        if self._state[name] == GONE:
            self._note()  # or after a crash it would be asked again
        return offence

    def _counted(self, name: str, raw: bytes, message: Message) -> None:
        """Take an answer, or say what is wrong with it."""
        if isinstance(message, Refusal):
            self._refused[name] += 1
            if self._refused[name] >= PATIENCE:
                self._state[name] = GONE
            raise _Passed(f"refused: {message.reason}")
        if not isinstance(message, Answer):
            raise MessageError(f"sent {message.kind} where an answer belongs")
        if message.round != self.round or name not in self._asked:
            if (name, message.round) in self._missed:
                self._missed.discard((name, message.round))
                raise _Passed(f"late with its answer to round {message.round}")
            raise MessageError(
                f"sent an answer to round {message.round}, which it was not asked for now"
            )
        if name in self._answers:
            if self._answers[name][0] == raw:
                raise _Passed("sent its answer twice; it counts once")
            raise MessageError("sent two different answers in one round")
        self._answers[name] = raw, sound(message.values, self.terms)

    # What goes out, and what is kept

    def _draw(self) -> None:
        """Images for the owners of this round. They are kept first: a server that goes on must send the same, for nobody answers twice."""
        found = self._streams.stored("requests")
        if found is None or int(found["round"]) != self.round:
            asked = self.terms.settings.asked(self.round, len(self.names))
            places = [place for place in asked if self._state[self.names[place]] == AGREED]
            if not places:
                return
            found = {
                "images": self._drawing.draw(self.round, places),
                "round": torch.tensor(self.round),
                "places": torch.tensor(places),
            }
            self._streams.store("requests", found)
        else:  # a GPU would not draw them again to the bit, but near enough to go on from there
            self._drawing.draw(self.round, found["places"].tolist())
        self._images = found["images"].cpu()
        self._asked = {self.names[place]: row for row, place in enumerate(found["places"].tolist())}

    def _sent(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        if self._record:
            for name, raw in messages.items():
                self._record.sent(name, raw)
        return messages

    def _keep(self) -> None:
        """After each round: the generator, then who said what. Between the two a crash loses words, and no step."""
        if self._folder is None:
            return
        self._streams.store(
            "generator",
            {
                **self._drawing.kept(),
                "round": torch.tensor(self.round),
                "taken": torch.tensor(self.taken),
            },
        )
        self._note()

    def _note(self) -> None:
        """Who said what."""
        if self._folder is None:
            return
        said = {
            "terms": hashlib.sha256(self._offer).hexdigest(),
            "names": self.names,
            "state": self._state,
            "refused": self._refused,
            "offences": [dataclasses.astuple(each) for each in self.offences],
            "missed": sorted(self._missed),
        }
        put(self._folder / "server.json", json.dumps(said).encode())

    def _resume(self, folder: Path) -> None:
        file = folder / "server.json"
        if not file.exists():
            self._keep()  # so that who agreed, and to what, is not forgotten
            return
        with refusing(
            ReleaseError,
            f"{file}: what an unfinished run had kept was altered; start anew, at a new charge for every owner",
        ):
            said = json.loads(file.read_text())
            if (
                said["terms"] != hashlib.sha256(self._offer).hexdigest()
                or tuple(said["names"]) != self.names
            ):
                raise ReleaseError(
                    f"{folder} holds a run with other terms or other owners: resume with the same ones, or remove it"
                )
            self._state = said["state"]
            self._refused = said["refused"]
            self.offences = [Offence(*each) for each in said["offences"]]
            self._missed = {(name, number) for name, number in said["missed"]}
            found = self._streams.stored("generator")
            if found is not None:
                self.round = int(found.pop("round"))
                self.taken = int(found.pop("taken"))
                self._drawing.restore(found)


class _Passed(Exception):  # noqa: N818 (it ends the hearing of a message, not a run)
    """Nothing of use, and no lie either."""
