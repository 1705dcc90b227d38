"""SGLang's hash of (seed, position, token), from which it samples, in plain torch.

SGLang 0.5.23 has it as a Triton kernel (kernels/ops/sampling/murmur_hash.py) and, for the CPU, only in a
package that is not on PyPI. It is 32-bit MurmurHash3 over the seed (both halves), position and token; equal
inputs give equal bits here and there.
"""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Return one 32-bit hash per row and column, held in 64-bit integers."""
    seed = seed.view(torch.int64)
    state = torch.zeros_like(seed)
    state = _mix(state, _scramble(seed & _LOW))
    state = _mix(state, _scramble((seed >> 32) & _LOW))
    state = _mix(state, _scramble(positions.to(torch.int64) & _LOW))
    hashed = _mix(state[:, None], _scramble(col_indices.to(torch.int64))[None, :])
    hashed.bitwise_xor_(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed.bitwise_xor_(hashed >> shift)
        hashed.mul_(factor).bitwise_and_(_LOW)
    return hashed.bitwise_xor_(hashed >> 16)


def _scramble(block: Tensor) -> Tensor:
    block = (block * 0xCC9E2D51) & _LOW
    return (_rotate(block, 15) * 0x1B873593) & _LOW


def _mix(state: Tensor, block: Tensor) -> Tensor:
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _rotate(number: Tensor, bits: int) -> Tensor:
    return ((number << bits) | (number >> (32 - bits))) & _LOW
