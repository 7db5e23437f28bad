"""Several samples of one request, and which of them come back, in which order."""

from llmc.runtime.api.results import Output
from llmc.runtime.engine.sequence import Job, Sample
from llmc.runtime.search import SIMILARITIES, expected_similarities


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
    scores = expected_similarities([output.text for output in outputs], similarity)
    scored = [sample.output(score) for sample, score in zip(samples, scores, strict=True)]
    return sorted(scored, key=lambda output: -(output.score or 0.0))
