"""Several samples of one request, and which of them come back, in which order."""

from llmc.runtime.results import Output
from llmc.runtime.search import SIMILARITIES, choose
from llmc.runtime.sequence import Job, Sample


def ranked(job: Job) -> list[Output]:
    """The outputs of a finished job: in the order of the samples, or the best first by what the job asks for.

    Raises:
        ProcessorError: the request's similarity raised, or returned no number.
    """
    samples = sorted(job.finished, key=lambda sample: sample.index)
    if job.params.consensus is not None or job.request.similarity is not None:
        return _by_consensus(job, samples)
    if job.params.best_of is not None:
        best = sorted(samples, key=lambda sample: -sample.mean_logprob)
        return [sample.output(sample.mean_logprob) for sample in best[: job.params.n]]
    return [sample.output() for sample in samples]


def _by_consensus(job: Job, samples: list[Sample]) -> list[Output]:
    similarity = job.request.similarity or SIMILARITIES[job.params.consensus or ""]
    outputs = [sample.output() for sample in samples]
    scores = choose([output.text for output in outputs], similarity).scores
    scored = [sample.output(float(score)) for sample, score in zip(samples, scores, strict=True)]
    return sorted(scored, key=lambda output: -(output.score or 0.0))
