"""`engine.scheduler: my_policy.py:MyPolicy`: a policy that the user has written, in place of the preset's."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path

from calibrate.engine import EngineSpec
from servecast.errors import ServecastError, one_of
from sim.schedulers import Scheduler, scheduler_of
from sim.schedulers.audit import Audited

KEY = "engine.scheduler"


def split(word: object) -> tuple[str, str]:
    """("my_policy.py", "MyPolicy"). Raises ServecastError for anything else."""
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", word) if isinstance(word, str) else None
    if match is None:
        raise ServecastError(f"{KEY}: {word!r}; expected a file and a class in it, as in my_policy.py:MyPolicy")
    return match[1], match[2]


def own_policy(path: Path, name: str, engine: EngineSpec) -> Scheduler:
    """The class `name` of the file, made with those of the engine's options that it asks for, and watched.

    What it asks for are the names of its parameters (or dataclass fields). Raises ServecastError for a file that cannot
    be loaded, a class that is no Scheduler, and parameters that are not among the options.
    """
    cls = _load(path, name)
    known = dict(engine.options) | {f: getattr(engine, f) for f in ("max_num_seqs", "max_num_batched_tokens")}
    parameters = inspect.signature(cls).parameters.values()
    missing = [p.name for p in parameters if p.name not in known and p.default is p.empty]
    if missing:
        raise ServecastError(
            f"{KEY}: {name} asks for {one_of(missing)}, which {engine.preset} does not have; give it a default, or "
            f"take one of {one_of(known)}"
        )
    try:
        policy = cls(**{p.name: known[p.name] for p in parameters if p.name in known})
    except Exception as error:
        raise ServecastError(f"{KEY}: {name} cannot be made: {type(error).__name__}: {error}") from error
    usual = scheduler_of(engine)
    if engine.enable_prefix_caching and policy.cache is not usual.cache:
        raise ServecastError(f"{KEY}: {name} takes blocks by {policy.cache.__name__}: set enable_prefix_caching false")
    return Audited(policy, name, engine.max_num_batched_tokens, engine.max_num_seqs)


def _load(path: Path, name: str) -> type[Scheduler]:
    if not path.is_file():
        raise ServecastError(f"{KEY}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"servecast_own_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of a class
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ServecastError(f"{KEY}: {path} cannot be loaded: {type(error).__name__}: {error}") from error
    classes = {n: c for n, c in vars(module).items() if inspect.isclass(c)}
    own = {n: c for n, c in classes.items() if issubclass(c, Scheduler) and c is not Scheduler}
    if name not in own:
        raise ServecastError(
            f"{KEY}: {path} has no class {name} that inherits from sim.schedulers.Scheduler; it has "
            f"{one_of(own) if own else 'none that does'}"
        )
    if own[name].plan is Scheduler.plan:
        raise ServecastError(f"{KEY}: {name} has no plan(state), which makes a step's batch (docs/own-policy)")
    return own[name]
