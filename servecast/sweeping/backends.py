"""Where runs are done: the cores of this machine, a Dask or a Ray cluster. Each gives back rows as they finish.

A worker may be killed at any time: its runs are done again, and a run that takes its worker with it again and again is
given up, with a row that says so.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from servecast.errors import ServecastError
from servecast.sweeping.runs import Base, Row, Task, about_worker, ignore_interrupts, lost, run

Rows = Generator[Row, None, None]
Backend = Callable[[Base, Sequence[Task], "int | None", "str | None"], Rows]

TRIES = 3
"""How often a run may lose its worker."""
ANSWER_S = 10.0
"""How long a cluster may take to answer."""
WORKERS_S = 60.0
"""How long a cluster may take until it has a worker."""
AHEAD = 4
"""Runs that a cluster is given ahead, for each of its cores."""
KILLED = f"its worker ended {TRIES} times while it ran: killed, or out of memory?"


def cores() -> int:
    """Of this machine, those that this process may use."""
    from joblib import cpu_count

    return int(cpu_count())


def local(base: Base, tasks: Sequence[Task], workers: int | None, address: str | None) -> Rows:
    """On the cores of this machine, in processes that stay; with one worker, in this one."""
    if address is not None:
        raise ServecastError("--address: names a cluster; give --backend dask or --backend ray too")
    yield from on_cores(partial(run, base), tasks, workers)


def on_cores(work: Callable[[Task], Row], tasks: Sequence[Task], workers: int | None) -> Rows:
    """What `work` makes of each task, on the cores of this machine."""
    workers = workers or cores()
    if workers == 1:
        yield from map(work, tasks)
        return
    from joblib.externals.loky import BrokenProcessPool

    pending, ended = {task.id: task for task in tasks}, Counter[str]()
    while pending:
        todo = list(pending.values())
        if suspects := [task for task in todo if ended[task.id]]:
            todo = suspects[:1]
        try:
            with closing(_in_processes(work, todo, workers)) as rows:
                for row in rows:
                    del pending[row["id"]]
                    yield row
        except BrokenProcessPool:
            # Which run it was is not told. It was among the first that are not back; they run alone now.
            for task in islice((task for task in todo if task.id in pending), 2 * workers):
                ended[task.id] += 1
                if ended[task.id] > TRIES:
                    del pending[task.id]
                    yield lost(task, KILLED)


def _in_processes(work: Callable[[Task], Row], tasks: Iterable[Task], workers: int) -> Any:
    from joblib import Parallel, delayed, parallel_config

    with parallel_config("loky", initializer=ignore_interrupts):
        parallel = Parallel(workers, return_as="generator_unordered", batch_size=1, pre_dispatch="2 * n_jobs")
        return parallel(delayed(work)(task) for task in tasks)


def dask(base: Base, tasks: Sequence[Task], workers: int | None, address: str | None) -> Rows:
    """On the Dask cluster whose scheduler is at `address`; without one, on a cluster that is started here."""
    distributed = _library("distributed", "dask")
    _reachable(address, "tcp://10.0.0.1:8786")
    with _dask_client(distributed, workers, address) as client:
        waiting, running = iter(tasks), distributed.as_completed()
        task_of: dict[Any, Task] = {}

        def submit(count: int) -> None:
            for task in islice(waiting, count):
                future = client.submit(run, base, task, key=f"servecast-{task.id}", pure=False)
                task_of[future.key] = task
                running.add(future)

        submit(AHEAD * max(1, sum(client.nthreads().values())))
        for future in running:
            task = task_of.pop(future.key)
            try:
                row = future.result()
            except distributed.KilledWorker:
                row = lost(task, KILLED)
            except (distributed.CancelledError, OSError):
                raise _gone(address) from None
            except Exception as error:  # what a row cannot say, as when it does not come back whole
                row = lost(task, f"{type(error).__name__}: {error}"[:500])
            yield row
            submit(1)


@contextmanager
def _dask_client(distributed: Any, workers: int | None, address: str | None) -> Iterator[Any]:
    import logging

    cluster = None
    try:
        try:
            if address is None:
                cluster = distributed.LocalCluster(
                    n_workers=workers or cores(), threads_per_worker=1, dashboard_address=None,
                    silence_logs=logging.CRITICAL,
                )  # fmt: skip

            client = distributed.Client(cluster or address, timeout=ANSWER_S)
        except (OSError, RuntimeError) as error:
            raise _no_answer(address, error) from None
        with client:
            try:
                client.wait_for_workers(1, timeout=WORKERS_S)
            except TimeoutError:
                raise ServecastError(
                    f"--address {address}: the cluster has had no worker for {WORKERS_S:g} s"
                ) from None
            try:
                found = client.run(about_worker)
            except Exception as error:
                raise _cannot_run(error) from None
            _same_version(found)
            yield client
    finally:
        if cluster is not None:
            cluster.close()


def ray(base: Base, tasks: Sequence[Task], workers: int | None, address: str | None) -> Rows:
    """On the Ray cluster at `address` (`auto`: the one that runs here); without one, on one that is started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = _library("ray", "ray")
    if address != "auto":
        _reachable(address, "ray://10.0.0.1:10001, or auto")
    ours = not ray.is_initialized()
    if ours:
        _ray_init(ray, workers, address)
    try:
        yield from _on_ray(ray, base, tasks, address)
    finally:
        if ours:
            ray.shutdown()


def _ray_init(ray: Any, workers: int | None, address: str | None) -> None:
    import logging

    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        if address is None:
            ray.init(num_cpus=workers or cores(), include_dashboard=False, **quiet)
        else:
            ray.init(address, **quiet)
    except (OSError, RuntimeError, TimeoutError) as error:  # ConnectionError is an OSError
        raise _no_answer(address, error) from None


def _on_ray(ray: Any, base: Base, tasks: Sequence[Task], address: str | None) -> Rows:
    remote = ray.remote(max_retries=TRIES - 1)(run)
    try:
        _same_version({"the workers": ray.get(ray.remote(about_worker).remote(), timeout=WORKERS_S)})
    except ray.exceptions.GetTimeoutError:
        raise ServecastError(f"--address {address}: the cluster has not begun a run in {WORKERS_S:g} s") from None
    except ray.exceptions.RayError as error:
        raise _cannot_run(error) from None
    shared, waiting = ray.put(base), iter(tasks)
    ahead = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    running = {remote.remote(shared, task): task for task in islice(waiting, ahead)}
    while running:
        done, _ = ray.wait(list(running), num_returns=1)
        for reference in done:
            task = running.pop(reference)
            try:
                row = ray.get(reference)
            except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError):
                row = lost(task, KILLED)
            except ray.exceptions.RayError as error:
                row = lost(task, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
            except ConnectionError:
                raise _gone(address) from None
            yield row
            running |= {remote.remote(shared, task): task for task in islice(waiting, 1)}


BACKENDS: dict[str, Backend] = {"local": local, "dask": dask, "ray": ray}


def _library(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ServecastError(
            f"--backend {extra}: {module} is not installed; pip install 'servecast[{extra}]'"
        ) from None


def _reachable(address: str | None, example: str) -> None:
    """Raises ServecastError where nothing listens: the libraries try again for minutes."""
    if address is None:
        return
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ServecastError(f"--address {address}: is not an address; write it like {example}")
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        raise _no_answer(address, error) from None


def _no_answer(address: str | None, error: Exception) -> ServecastError:
    said = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
    if address is None:
        return ServecastError(f"--backend: a cluster on this machine does not start: {said}")
    return ServecastError(f"--address {address}: no cluster answers there: {said}")


def _gone(address: str | None) -> ServecastError:
    return ServecastError(
        f"the cluster{f' at {address}' if address else ''} is gone. The runs that were back are kept; the same command "
        "goes on from there"
    )


def _cannot_run(error: Exception) -> ServecastError:
    said = " ".join(str(error).split())[:300]
    return ServecastError(
        f"the cluster's workers cannot run servecast: {said}; install servecast {version('servecast')} there"
    )


def _same_version(found: dict[Any, str]) -> None:
    """Raises ServecastError where a worker would simulate something else."""
    if other := sorted({theirs for theirs in found.values() if theirs != version("servecast")}):
        raise ServecastError(
            f"the cluster's workers have servecast {', '.join(other)}, and this is {version('servecast')}; install the "
            "same one"
        )
