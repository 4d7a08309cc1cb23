"""Train a generator and a discriminator, each in its own DistributedDataParallel with its own sharded optimizer.

Start it with: torchrun --nproc-per-node 2 gan.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner


def sharded(model: nn.Module) -> tuple[DistributedDataParallel, Optimizer]:
    """Return the model in DDP, and its optimizer with the hook."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=1e-3, partition="split")
    register_reduce_to_owner(ddp, optimizer)
    return ddp, optimizer


def iterate(
    generator: DistributedDataParallel,
    discriminator: DistributedDataParallel,
    generator_optimizer: Optimizer,
    discriminator_optimizer: Optimizer,
    real: torch.Tensor,
    noise: torch.Tensor,
) -> tuple[float, float]:
    """Step the discriminator, then the generator, and return this rank's losses of both."""
    fake = generator(noise)
    is_real, is_fake = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])

    discriminator_optimizer.zero_grad()
    scores = discriminator(torch.cat([real, fake.detach()]))
    discriminator_loss = binary_cross_entropy_with_logits(scores, torch.cat([is_real, is_fake]))
    discriminator_loss.backward()
    discriminator_optimizer.step()

    # Only the generator gets gradients; the discriminator without its DDP has nothing to reduce.
    discriminator.requires_grad_(False)
    generator_optimizer.zero_grad()
    generator_loss = binary_cross_entropy_with_logits(discriminator.module(fake), is_real)
    generator_loss.backward()
    generator_optimizer.step()
    discriminator.requires_grad_(True)
    return discriminator_loss.item(), generator_loss.item()


def main() -> None:
    """Train for 200 steps, and print the losses."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator, generator_optimizer = sharded(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
    discriminator, discriminator_optimizer = sharded(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)))

    torch.manual_seed(dist.get_rank())
    for step in range(200):
        real, noise = torch.randn(32, 2) + 3, torch.randn(32, 8)
        losses = iterate(generator, discriminator, generator_optimizer, discriminator_optimizer, real, noise)
        if dist.get_rank() == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss of the discriminator {losses[0]:.2f}, of the generator {losses[1]:.2f}")
    del generator, discriminator
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
