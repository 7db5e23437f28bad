"""A diffusion model's answer as one branch of a request: a call a step, and tokens when a block is whole."""

from llmc.runtime.diffusion.denoiser import Denoiser
from llmc.runtime.engine.branch import SamplerOutput
from llmc.runtime.engine.sample_group import Sample, SampleGroup
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.samplers import Choice


class Diffused(Sample):
    """A sample whose tokens come by blocks, which a :class:`Denoiser` fills."""

    is_fed = False
    denoiser: Denoiser

    @property
    def room(self) -> int:
        return self.denoiser.length

    def propose(self, room: int, rows: int) -> list[int]:
        self.window = self.denoiser.window()
        return []

    def sample(self, logits: Logits) -> SamplerOutput["Sample"]:
        output: SamplerOutput[Sample] = SamplerOutput(self)
        self.cached = self.denoiser.length
        self.request.timeline.calls += 1
        try:
            output.choices += map(Choice, self.denoiser.take(logits))
        except BaseException as error:  # noqa: BLE001  # raised again where the request is known
            output.error = error
        return output


class DiffusedGroup(SampleGroup):
    """The one answer of a request."""

    def begin(self, scheduler: Scheduler, branch: Sample, logits: Logits | None) -> bool:
        """Nothing is fed before the first step."""
        return False
