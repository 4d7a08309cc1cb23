"""Log what is known of gradients while reduce_to_owner_hook is in use, to TensorBoard or to Weights & Biases.

Start it with: torchrun --nproc-per-node 2 gradients.py tensorboard
Instead of "tensorboard" it may be "wandb".
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from zeroshard import GradPlaceholder, ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner


def nonfinite_gradients(model: nn.Module) -> list[str]:
    """Return the names of gradients with a NaN or an infinity. On any rank, local."""
    params = [(name, param) for name, param in model.named_parameters() if param.grad is not None]
    return [name for name, param in params if not param.grad.norm().isfinite()]


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Return the 2-norm of each gradient. On any rank, local."""
    params = [(name, param) for name, param in model.named_parameters() if param.grad is not None]
    return {f"grad_norm/{name}": param.grad.norm().item() for name, param in params}


def sharding_metrics(optimizer: ZeroRedundancyOptimizer) -> dict[str, float]:
    """Return the bytes of state here, and what this rank has sent and waited so far."""
    metrics = {"zeroshard/state_bytes": float(optimizer.describe().state_bytes_here)}
    for kind in ("reduce", "broadcast"):  # gradients to their owners, parameters to all ranks
        volume = optimizer.traffic.of(kind)
        metrics[f"zeroshard/{kind}_bytes_sent"] = volume.bytes_sent
        metrics[f"zeroshard/{kind}_seconds_waited"] = volume.seconds_waited
    return metrics


def largest_gradients(model: nn.Module) -> dict[str, float]:
    """Return the largest magnitude in each gradient. Collective: all ranks call it."""
    params = dict(model.named_parameters())
    largest = torch.zeros(len(params), device=next(model.parameters()).device)
    for index, param in enumerate(params.values()):
        owned = param.grad.owned if isinstance(param.grad, GradPlaceholder) else None
        if owned is not None:
            largest[index] = owned.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(params, largest.tolist(), strict=True))


def logger(name: str) -> Callable[[dict[str, float], int], None]:
    """Return what logs the metrics of a step."""
    if name == "wandb":
        import wandb

        run = wandb.init(project="zeroshard-example")
        return lambda metrics, step: run.log(metrics, step=step)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter()

    def log(metrics: dict[str, float], step: int) -> None:
        for tag, value in metrics.items():
            writer.add_scalar(tag, value, step)
        writer.flush()

    return log


def main() -> None:
    """Train a small model, and log from rank 0."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 10))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=1e-3, partition="split")
    register_reduce_to_owner(ddp, optimizer)
    log = logger(sys.argv[1]) if dist.get_rank() == 0 else None

    torch.manual_seed(dist.get_rank())
    for step in range(20):
        optimizer.zero_grad()
        ddp(torch.randn(8, 100)).square().mean().backward()
        # Between backward and step(), where gradients are what backward has made them.
        if bad := nonfinite_gradients(model):
            raise RuntimeError(f"step {step}: NaN or infinity in the gradients of {', '.join(bad)}")
        metrics = gradient_norms(model) if log else {}
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0).item()
        optimizer.step()
        if log:
            log(metrics | sharding_metrics(optimizer), step)
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
