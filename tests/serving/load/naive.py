"""The simulator's engine once more: step by step, page by page, with nothing clever in it."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvprof.serving.load.requests import Request


@dataclass(eq=False)
class _Job:
    request: Request
    computed: int = 0
    times: list = field(default_factory=list)
    pages: list = field(default_factory=list)
    named: int = 0  # pages that were looked at for a name

    @property
    def tokens(self):
        return self.request.prompt + len(self.times)


class NaiveEngine:
    """One replica: vLLM's loop over running and waiting requests, written down plainly."""

    def __init__(self, settings, times):
        self.settings, self.times = settings, times
        self.unwritten = list(range(settings.pages))
        self.idle = OrderedDict()  # page -> what it can be found by, the first is taken first
        self.keyed = {}  # key -> pages, the first of which is found
        self.key_of = {}  # page -> key
        self.references = dict.fromkeys(range(settings.pages), 0)
        self.waiting, self.running = deque(), []
        self._decoding = set()
        self.preemptions = self.computed = 0

    # --- Pages.

    def free(self):
        return len(self.unwritten) + len(self.idle)

    def new_page(self):
        if self.unwritten:
            page = self.unwritten.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            key = self.key_of.pop(page, None)
            if key is not None:
                self.keyed[key].remove(page)
        self.references[page] = 1
        return page

    def key(self, job, index):
        size = self.settings.block_size
        request = job.request
        shared = min(request.prefix, request.prompt) // size if request.session is not None else 0
        return (request.session, index) if index < shared else ("own", request.number, index)

    def write(self, job):
        """Name the pages that are full."""
        if not self.settings.prefix_caching:
            return
        full = job.computed // self.settings.block_size
        for index in range(job.named, full):
            key, page = self.key(job, index), job.pages[index]
            self.keyed.setdefault(key, []).append(page)
            self.key_of[page] = key
        job.named = full

    def give_back(self, job, full):
        partial = job.pages[full:]
        for page in partial:
            self.references[page] = 0
            self.unwritten.append(page)
        for page in reversed(job.pages[:full]):
            self.references[page] -= 1
            if not self.references[page]:
                if self.settings.prefix_caching:
                    self.idle[page] = None
                else:
                    self.unwritten.append(page)
        job.pages = []

    def found(self, job):
        pages = []
        for index in range((job.tokens - 1) // self.settings.block_size):
            copies = self.keyed.get(self.key(job, index))
            if not copies:
                break
            pages.append(copies[0])
        return pages

    # --- A step.

    def extend(self, job, tokens):
        wanted = -(-(job.computed + tokens) // self.settings.block_size) - len(job.pages)
        if wanted > self.free():
            return False
        job.pages += [self.new_page() for _ in range(wanted)]
        return True

    def preempt(self, job):
        self.preemptions += 1
        self.give_back(job, job.computed // self.settings.block_size)
        job.computed = 0
        self.waiting.appendleft(job)

    def step(self, now):
        """Do one step, and return its end and who was finished; None when nothing is to do."""
        settings, budget = self.settings, self.settings.max_num_batched_tokens
        planned, preempted, index = [], False, 0
        while index < len(self.running) and budget:
            job = self.running[index]
            tokens = min(job.tokens - job.computed, budget)
            fits = self.extend(job, tokens)
            while not fits:
                last = self.running.pop()
                self.preempt(last)
                preempted = True
                if last is job:
                    break
                fits = self.extend(job, tokens)
            if not fits:
                break
            planned.append((job, job.computed, tokens))
            budget -= tokens
            index += 1
        # Running ones name their pages before any other is admitted.
        for job, before, tokens in planned:
            job.computed = before + tokens
            self.write(job)
        while (
            not preempted and self.waiting and budget and len(self.running) < settings.max_num_seqs
        ):
            job = self.waiting[0]
            pages = self.found(job)
            unheld = sum(1 for page in pages if not self.references[page])
            if -(-job.tokens // settings.block_size) - len(pages) + unheld > self.free():
                break
            self.waiting.popleft()
            for page in pages:
                self.idle.pop(page, None)
                self.references[page] += 1
            job.pages = list(pages)
            job.named = len(pages)
            job.computed = len(pages) * settings.block_size
            tokens = min(job.tokens - job.computed, budget)
            assert self.extend(job, tokens)
            planned.append((job, job.computed, tokens))
            job.computed += tokens
            self.write(job)
            self.running.append(job)
            budget -= tokens
        if not planned:
            return None
        seconds, tokens_in_all = 0.0, 0
        for job, before, tokens in planned:
            tokens_in_all += tokens
            if job.times and tokens == 1 and before + 1 == job.tokens and job in self._decoding:
                seconds += self.times.per_context * (before + 1) + self.times.per_sequence
            else:
                seconds += self.times.per_pair * sum(before + i + 1 for i in range(tokens))
        self.computed += tokens_in_all
        end = now + seconds + self.times.dense(tokens_in_all)
        finished = []
        self._decoding = set()
        for job, before, tokens in planned:
            if before + tokens == job.tokens:
                job.times.append(end)
                if len(job.times) == job.request.output:
                    self.running.remove(job)
                    self.give_back(job, job.computed // settings.block_size)
                    finished.append(job)
                else:
                    self._decoding.add(job)
        return end, finished

    def serve(self, requests):
        """Return the times of every request's tokens."""
        jobs = [_Job(request) for request in requests]
        coming, now = deque(jobs), 0.0
        while True:
            while coming and coming[0].request.arrival <= now:
                self.waiting.append(coming.popleft())
            found = self.step(now)
            if found is not None:
                now = found[0]
            elif coming:
                now = coming[0].request.arrival
            else:
                return [job.times for job in jobs]
