"""What a tile of the fused loss costs on a device: rates, and where they come from. Imports no torch.

On CPUs a fit. On GPUs a roofline, product by product: a product takes as long as its arithmetic or its memory traffic,
whichever is longer, and the pointwise part as long as its traffic. For w rows, v columns, operands of e bytes and
results in float32, the traffic is

    logits, of width H      e (w + v) H + 4 w v
    dH += G W               e (w v + v H_s) + 8 w H_s        (the float32 sum is read and written)
    dW += G' h              e (w v + w H_s) + 8 v H_s        (16 v H_s where the GPU cannot add in the product)
    pointwise               8 w v a pass, and e w v for G

so a product is bound by arithmetic from some 200 rows on (H100) where only operands are read, and from some 1,000 on
where dW is read and written. Results are counted in tiles of 128 x 128 over the GPU's processors: 1,024 rows of
H_s = 4,096 make 256 of them, which 132 processors take in two rounds and 108 in three, so an A100 wants other windows
than an H100. Not measured on a GPU yet; `disaggkd bench loss --head reference` shows what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

_RESULT_TILE = 128


@dataclass(frozen=True)
class TileWork:
    """What happens to a tile of `window` rows and `shard` columns.

    Attributes:
        student_width, teacher_width: H_s and H_t.
        student_products, teacher_products: how often its logits are multiplied, on average.
        hidden_gradient, weight_gradient: which gradients are added.
        passes: how often the pointwise part goes over it.
        operand_bytes: per element of the products' operands.
        result_bytes: per element of logits and sums.
        weight_copy: dW's products pass through a buffer before they are added.
    """

    window: int
    shard: int
    student_width: int
    teacher_width: int
    student_products: float
    teacher_products: float
    hidden_gradient: bool
    weight_gradient: bool
    passes: int
    operand_bytes: int
    result_bytes: int
    weight_copy: bool


@dataclass(frozen=True)
class CpuModel:
    """Rates of a CPU.

    Attributes:
        flops: rate of matrix products, FLOP/s.
        half_window: rows at which a window's matrix products run at half their rate (reading the head and adding to its
            gradient cost the same for every window, however few its rows).
        largest_tile: elements of a tile beyond which the products slow down.
        largest_block: elements of a block of the eager pointwise part.
        call_seconds: cost of the calls for one tile and pass.
    """

    flops: float
    half_window: float
    largest_tile: int
    largest_block: int
    call_seconds: float

    def seconds(self, work: TileWork) -> float:
        """Return what one tile takes, without its calls."""
        products = work.student_products * work.student_width + work.teacher_products * work.teacher_width
        products += work.student_width * (work.hidden_gradient + work.weight_gradient)
        slowdown = (1 + self.half_window / work.window) * (1 + self.half_window / work.shard)
        flops = 2.0 * work.window * work.shard * products
        return flops / self.flops * slowdown


@dataclass(frozen=True)
class GpuModel:
    """Rates of a GPU.

    Attributes:
        flops: the best rate of bf16 matrix products that was measured on one, FLOP/s.
        bytes_per_second: of its memory, as copies reach it.
        processors: its streaming multiprocessors.
        largest_tile, largest_block, call_seconds: as in CpuModel.
    """

    flops: float
    bytes_per_second: float
    processors: int
    largest_tile: int = 2**27
    largest_block: int = 2**23
    call_seconds: float = 6e-5

    def seconds(self, work: TileWork) -> float:
        """Return what one tile takes, without its calls."""
        w, v, e = work.window, work.shard, work.operand_bytes
        h_s, h_t, r = work.student_width, work.teacher_width, work.result_bytes
        total = work.student_products * self._product(w, v, h_s, e * (w + v) * h_s + r * w * v, e)
        total += work.teacher_products * self._product(w, v, h_t, e * (w + v) * h_t + r * w * v, e)
        if work.hidden_gradient:
            total += self._product(w, h_s, v, e * (w * v + v * h_s) + 2 * r * w * h_s, e)
        if work.weight_gradient:
            sums = (4 if work.weight_copy else 2) * r * v * h_s
            total += self._product(v, h_s, w, e * (w * v + w * h_s) + sums, e)
        gradient = e * w * v if work.hidden_gradient or work.weight_gradient else 0
        return total + (work.passes * 2 * r * w * v + gradient) / self.bytes_per_second

    def _product(self, rows: int, columns: int, inner: int, traffic: float, operand_bytes: int) -> float:
        tiles = -(-rows // _RESULT_TILE) * -(-columns // _RESULT_TILE)
        rounds = -(-tiles // self.processors)
        # float32 operands are multiplied outside the tensor cores, at about a fifteenth of bf16's rate.
        rate = self.flops if operand_bytes <= 2 else self.flops / 15
        flops = 2.0 * rounds * self.processors * _RESULT_TILE**2 * inner
        useful = 2.0 * rows * columns * inner
        # One round that is not full is cut along `inner` by the libraries instead, so it loses less.
        arithmetic = (flops if tiles > self.processors else min(flops, 1.3 * useful)) / rate
        return max(arithmetic, traffic / self.bytes_per_second)


DEVICES: dict[str, CpuModel | GpuModel] = {
    # Fitted on 2 threads of an AMD EPYC with AVX-512 (`disaggkd bench loss` shows what became of it): products at
    # windows of 1024, 512, 256, 128, 64 rows took 1.00, 1.02, 1.09, 1.18, 1.38 of the best time.
    "cpu": CpuModel(flops=2.0e11, half_window=24, largest_tile=2**20, largest_block=2**16, call_seconds=2e-4),
    # Best measured bf16 products and memory as in the planner's catalogue (its sources are named there): 794.5 TFLOP/s
    # on H100 and H200, 271 on A100; 90 % of the datasheets' memory rates.
    "H200": GpuModel(flops=7.9e14, bytes_per_second=4.3e12, processors=132),
    "H100": GpuModel(flops=7.9e14, bytes_per_second=3.0e12, processors=132),
    "A100": GpuModel(flops=2.7e14, bytes_per_second=1.8e12, processors=108),
}
NEWEST_KNOWN, OLDEST_KNOWN = "H100", "A100"


def device_key(name: str, capability: tuple[int, int]) -> str:
    """Return the key of DEVICES for a GPU that calls itself `name`, of this compute capability.

    A GPU that is not in DEVICES is taken for the one of its generation that is.
    """
    for key in DEVICES:
        if key in name:
            return key
    return NEWEST_KNOWN if capability >= (9, 0) else OLDEST_KNOWN
