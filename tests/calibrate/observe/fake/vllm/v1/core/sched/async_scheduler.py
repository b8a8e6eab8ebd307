from vllm.v1.core.sched.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    asynchronous = True
