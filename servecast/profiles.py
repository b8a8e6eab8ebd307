"""Which prices a GPU gets: the profile that was asked for, the one that is shipped, or the datasheet."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from calibrate.datasheet import Datasheet
from calibrate.hardware import Gpu, gpu_ids
from calibrate.prices import Prices
from calibrate.profile import FOLDER, Profile, load_profile, profile_names
from servecast.errors import ServecastError, nearest, one_of

DATASHEET = "datasheet"


def find_profile(word: str) -> Profile:
    """The profile in the file `word`, or the one shipped for the GPU of that name. Of other things that it may name,
    says what to do with them."""
    path, name, shipped = Path(word), word.lower(), profile_names()
    if name in shipped:
        return load_profile(FOLDER / f"{name}.json")
    if path.is_dir():
        measured = (path / "device.yaml").is_file()
        hint = f"; to fit one to these measurements: servecast calibrate fit {word} --out FILE" if measured else ""
        raise ServecastError(f"{word}: a folder; a profile is a JSON file{hint}")
    if path.exists():
        return load_profile(path)
    why = (
        "no profile of it is shipped, its kernels are priced from the datasheet"
        if name in gpu_ids()
        else f"no such file, nor a GPU with a shipped profile{nearest(name, shipped)}"
    )
    raise ServecastError(f"{word}: {why}; shipped are {one_of(shipped)}")


@lru_cache(maxsize=8)
def _loaded(path: Path, changed_ns: int) -> Profile:
    """A sweep asks for the same one again and again; `changed_ns` makes a file that was written since another one."""
    return load_profile(path)


def prices_of(gpu: Gpu, profile: Path | str | None) -> Prices:
    """Prices of kernels on `gpu`: those of `profile` (a file, or "datasheet"), by default the shipped ones or the
    datasheet's."""
    if profile == DATASHEET or (profile is None and gpu.id not in profile_names()):
        return Datasheet(gpu)
    path = FOLDER / f"{gpu.id}.json" if profile is None else Path(profile)
    found = _loaded(path, path.stat().st_mtime_ns if path.is_file() else 0)
    if found.gpu.id != gpu.id:
        raise ServecastError(f"{profile}: is the profile of {found.gpu.id}, not of {gpu.id}")
    return found
