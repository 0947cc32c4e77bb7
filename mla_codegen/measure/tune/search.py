"""Which candidates are tried: all of them where they are few, else those that a seeded TPE asks for.

Timings that the store has are taken from it, so an interrupted search, begun again, asks for the same candidates and
goes on where it stopped. They may come from another day; the finalists are therefore timed anew, interleaved with the
current setting, and only that decides.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mla_codegen.measure.tune.space import Candidate, Space
from mla_codegen.measure.tune.store import Measured, Store
from mla_codegen.measure.workload import Workload

NOISE = 0.02  # a smaller gain over the current setting is none
FINALISTS = 3
TRIES = 40  # suggestions for each candidate wanted: most may be illegal, or known


class Machine(Protocol):
    """Where candidates are tried. `batch`: how many it likes to get at a time."""

    device: str
    triton: str
    batch: int

    def measure(self, workload: Workload, candidates: Sequence[Candidate], final: bool) -> list[Measured]:
        """What became of each: timed interleaved with the others if it is right. `final`: more rounds."""


@dataclass(frozen=True)
class Found:
    """The end of one search. `winner` is `current` unless something beat it by more than the noise.

    now, best       of both, timed interleaved
    tried, reused   candidates measured or taken from the store, and those of them that the store had
    dropped         why candidates were dropped: reason -> how many
    """

    space: Space
    winner: Candidate
    now: Measured
    best: Measured
    tried: int
    reused: int
    dropped: dict[str, int]

    @property
    def improved(self) -> bool:
        return bool(self.winner.settings)


Progress = Callable[[str, int], None]


class Search:
    """One search: `run` it once. `hints`: settings that are tried before others, winners of similar shapes say."""

    def __init__(
        self,
        space: Space,
        machine: Machine,
        store: Store,
        trials: int,
        seed: int,
        progress: Progress | None = None,
        hints: Sequence[dict[str, Any]] = (),
    ):
        self.space, self.machine, self.store, self.hints = space, machine, store, hints
        self.trials, self.seed, self.progress = trials, seed, progress
        self.results: dict[str, tuple[Candidate, Measured]] = {}  # by identity
        self.reused = 0

    def run(self) -> Found:
        few = self.space.count(self.trials)
        if few <= self.trials:
            self.trials = few + 1
            self._grid()
        else:
            self._ask()
        return self._final()

    def _grid(self) -> None:
        batch = [self.space.current]
        for settings in self.space.combinations():
            try:
                batch.append(self.space.candidate(settings))
            except ValueError:
                continue
            if len(batch) >= self.machine.batch:
                self._try(batch)
                batch = []
        self._try(batch)

    def _ask(self) -> None:
        import optuna
        from optuna.trial import TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=self.seed, multivariate=True, group=True, constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        for settings in (self.space.current.resolved, *self.hints):
            if parameters := self._as_trial(settings):
                study.enqueue_trial(parameters)
        suggestions = 0
        first = [self.space.current]  # beside others from the start: compiling it alone would leave cores idle
        while len(self.results) < self.trials and suggestions < TRIES * self.trials:
            asked: list[tuple[Any, Candidate]] = []
            new = {candidate.identity for candidate in first}
            wanted = min(self.machine.batch, self.trials - len(self.results))
            while len(new) < wanted and suggestions < TRIES * self.trials:
                suggestions += 1
                trial = study.ask()
                try:
                    candidate = self.space.candidate(self._suggest(trial))
                except ValueError:
                    study.tell(trial, state=TrialState.PRUNED)
                    continue
                known = self.results.get(candidate.identity)
                if known:
                    _tell(study, trial, known[1])
                else:
                    asked.append((trial, candidate))
                    new.add(candidate.identity)
            self._try([*first, *(candidate for _, candidate in asked)])
            first = []
            for trial, candidate in asked:
                _tell(study, trial, self.results[candidate.identity][1])

    def _as_trial(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings as the study's parameters, as far as it has them."""
        family = settings.get("family")
        knobs = self.space.families.get(str(family), {})
        named = {f"{family}.{knob}": settings[knob] for knob in knobs if settings.get(knob) in knobs[knob]}
        return {"family": family, **named} if knobs and len(self.space.families) > 1 else named

    def _suggest(self, trial: Any) -> dict[str, Any]:
        names = list(self.space.families)
        family = trial.suggest_categorical("family", names) if len(names) > 1 else names[0]
        knobs = self.space.families[family].items()
        return {"family": family} | {
            knob: trial.suggest_categorical(f"{family}.{knob}", list(values)) for knob, values in knobs
        }

    def _try(self, candidates: Sequence[Candidate]) -> None:
        """Fill `results` for those that are not in it."""
        distinct: dict[str, Candidate] = {}
        for candidate in candidates:
            if candidate.identity not in self.results:
                distinct.setdefault(candidate.identity, candidate)
        new = list(distinct.values())
        keys = {c.identity: c.key(self.space.workload, self.machine.device, self.machine.triton) for c in new}
        for candidate in new:
            known = self.store.get(keys[candidate.identity])
            if known:
                self.reused += 1
                self._note(candidate, known)
        fresh = [candidate for candidate in new if candidate.identity not in self.results]
        if not fresh:
            return
        for candidate, measured in zip(fresh, self.machine.measure(self.space.workload, fresh, False), strict=True):
            if not measured.lost:
                self.store.add(keys[candidate.identity], measured, self._about(candidate))
            self._note(candidate, measured)

    def _about(self, candidate: Candidate) -> dict[str, Any]:
        work = self.space.workload
        machine = {"device": self.machine.device, "triton": self.machine.triton}
        model = {"heads": work.heads, "latent": work.latent, "rope": work.rope}
        return {"shape": work.shape, "kv": self.space.kv, **model, "settings": candidate.resolved, **machine}

    def _note(self, candidate: Candidate, measured: Measured) -> None:
        self.results[candidate.identity] = (candidate, measured)
        if self.progress:
            best = min((m.us for _, m in self.results.values() if m.good), default=float("nan"))
            self.progress(f"{self.space}, best {best:.1f} us", self.trials)

    def _final(self) -> Found:
        current = self.space.current
        ranked = sorted((c for c, m in self.results.values() if m.good), key=lambda c: self.results[c.identity][1].us)
        rivals = [candidate for candidate in ranked if candidate.identity != current.identity][:FINALISTS]
        finals = self.machine.measure(self.space.workload, [current, *rivals], True)
        now, others = finals[0], finals[1:]
        winner, best = current, now
        for candidate, measured in zip(rivals, others, strict=True):
            if measured.good and (not best.good or measured.us < best.us):
                winner, best = candidate, measured
        if now.good and best.us * (1 + NOISE) >= now.us:
            winner, best = current, now
        dropped: dict[str, int] = {}
        for _, measured in self.results.values():
            if not measured.good:
                dropped[measured.failure] = dropped.get(measured.failure, 0) + 1
        return Found(self.space, winner, now, best, len(self.results), self.reused, dropped)


def _tell(study: Any, trial: Any, measured: Measured) -> None:
    from optuna.trial import TrialState

    if measured.good:
        study.tell(trial, measured.us)
    else:
        study.tell(trial, state=TrialState.PRUNED)
