"""Where runs are done: the cores of this machine, a Dask or a Ray cluster. Each gives back rows as they finish.

A worker may be killed at any time: its runs are done again, and a run that takes its worker with it again and again is
given up, with a row that says so.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from multiprocessing import resource_tracker
from queue import Empty, Queue
from threading import Thread
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
LOST_S = 300.0
"""How long a cluster may be without a worker while it has work."""
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
        ahead = AHEAD * max(1, sum(client.nthreads().values()))
        suspects = []
        for task, row in _on_dask(distributed, client, base, tasks, ahead, address):
            if row is None:
                suspects.append(task)
            else:
                yield row
        # Whatever waited for a worker that ended is under suspicion. Alone, each shows whether it was the cause.
        for task, row in _on_dask(distributed, client, base, suspects, 1, address):
            yield row or lost(task, KILLED)


def _on_dask(
    distributed: Any, client: Any, base: Base, tasks: Sequence[Task], ahead: int, address: str | None
) -> Iterator[tuple[Task, Row | None]]:
    """Each run and its row; None where workers ended with it again and again."""
    waiting, running, ended = iter(tasks), dict[str, tuple[Any, Task]](), Queue[Any]()
    alone_since: float | None = None

    def submit(count: int) -> None:
        for task in islice(waiting, count):
            future = client.submit(run, base, task, key=f"servecast-{task.id}-{ahead}", pure=False)
            running[future.key] = future, task
            future.add_done_callback(ended.put)

    submit(ahead)
    while running:
        row: Row | None = None
        try:
            try:
                future = ended.get(timeout=ANSWER_S)
            except Empty:
                alone_since = None if client.nthreads() else alone_since or time.monotonic()
                if alone_since is not None and time.monotonic() - alone_since > LOST_S:
                    raise _gone(address) from None
                continue
            row = future.result(timeout=ANSWER_S)
        except distributed.KilledWorker:
            pass
        except TimeoutError:  # its worker has ended since, and it is done again
            future.add_done_callback(ended.put)
            continue
        except (distributed.CancelledError, OSError):
            raise _gone(address) from None
        except ServecastError:
            raise
        except Exception as error:  # what a row cannot say, as when it does not come back whole
            row = lost(running[future.key][1], f"{type(error).__name__}: {error}"[:500])
        yield running.pop(future.key)[1], row
        submit(1)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes and threads that begin here never hear of ctrl-C: which runs end is for this process to say."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would let the signal through again when it begins
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _dask_client(distributed: Any, workers: int | None, address: str | None) -> Iterator[Any]:
    if address is not None:
        with _connected(distributed, address, address) as client:
            yield client
        return
    rules = {
        "distributed.deploy.lost-worker-timeout": f"{LOST_S} s",  # workers that end are started again
        "distributed.scheduler.allowed-failures": TRIES - 1,
    }
    with import_module("dask").config.set(rules):
        try:
            with _uninterrupted():
                cluster = distributed.LocalCluster(
                    n_workers=workers or cores(), threads_per_worker=1, dashboard_address=None,
                    silence_logs=logging.CRITICAL,
                )  # fmt: skip
        except (OSError, RuntimeError) as error:
            raise _no_answer(None, error) from None
        with cluster, _connected(distributed, cluster, None) as client:
            yield client


@contextmanager
def _connected(distributed: Any, cluster: Any, address: str | None) -> Iterator[Any]:
    """A client of a cluster that can run our runs. Raises ServecastError where it cannot."""
    try:
        client = _within(2 * ANSWER_S, lambda: distributed.Client(cluster, timeout=ANSWER_S))
    except Exception as error:  # another service's answer is read as anything
        raise _no_answer(address, error) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=WORKERS_S)
        except TimeoutError:
            raise ServecastError(f"--address {address}: the cluster has had no worker for {WORKERS_S:g} s") from None
        try:
            found = client.run(about_worker)
        except Exception as error:
            raise _cannot_run(error) from None
        _same_version(found)
        yield client


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
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        if address is None:
            ray.init(num_cpus=workers or cores(), include_dashboard=False, **quiet)
        else:
            _within(3 * ANSWER_S, lambda: ray.init(address, **quiet))
    except Exception as error:
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


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """`call()`. Raises TimeoutError where it takes longer: it waits for ever for something that listens in silence."""
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(_outcome(call)), daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"nothing was said in {seconds:g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


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
