"""Counts of compiled programs, against counts by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxformers.training import programs
from jaxformers.training.layout import Layout


def compile_for_shapes(function, *shapes):
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return jax.jit(function).lower(*arrays).compile()


def test_count_of_a_product_is_two_operations_for_each_entry():
  program = compile_for_shapes(jnp.matmul, (64, 48), (48, 32))
  counts = programs.count(program)
  assert counts.flops == 2 * 64 * 48 * 32
  assert counts.bytes >= 4 * (64 * 48 + 48 * 32 + 64 * 32)
  assert counts.loops == ()
  assert counts.collectives == ()


def test_count_multiplies_the_body_of_a_loop_by_its_trips():
  def run(w, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=7)[0]

  counts = programs.count(compile_for_shapes(run, (32, 32), (64, 32)))
  assert counts.flops == 7 * 2 * 64 * 32 * 32
  assert counts.loops == (7,)


def test_count_multiplies_nested_loops():
  def inner(c, _):
    return c @ c, None

  def outer(c, _):
    return jax.lax.scan(inner, c, length=3)[0], None

  def run(x):
    return jax.lax.scan(outer, x, length=5)[0]

  counts = programs.count(compile_for_shapes(run, (32, 32)))
  assert counts.flops == 15 * 2 * 32**3
  assert counts.loops == (5, 3)


def test_count_of_softmax_attention_has_two_products_of_scores():
  def attend(q, k, v):
    scores = jnp.einsum("bhqe,bhke->bhqk", q, k)
    return jnp.einsum("bhqk,bhke->bhqe", jax.nn.softmax(scores), v)

  b, h, n, e = 2, 4, 64, 16
  counts = programs.count(compile_for_shapes(attend, *3 * [(b, h, n, e)]))
  assert counts.flops == 2 * (2 * b * h * n * n * e)


def test_count_of_a_convolution_sums_over_window_and_channels():
  def convolve(x, w):
    return jax.lax.conv_general_dilated(
      x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )

  text = """
ENTRY %main (x: f32[2,10,8], w: f32[3,8,16]) -> f32[2,8,16] {
  %x = f32[2,10,8]{2,1,0} parameter(0)
  %w = f32[3,8,16]{2,1,0} parameter(1)
  ROOT %y = f32[2,8,16]{2,1,0} convolution(%x, %w), dim_labels=b0f_0io->b0f
}
"""
  shapes = [
    jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 10, 8), (3, 8, 16))
  ]
  assert jax.eval_shape(convolve, *shapes).shape == (2, 8, 16)
  assert programs.count(text).flops == 2 * (2 * 8 * 16) * 3 * 8


def test_count_of_a_batch_of_products_written_as_a_convolution():
  # 4 products of 6 x 8 with 8 x 5: the window meets one input at each output.
  text = """
ENTRY %main (x: f32[4,6,8], w: f32[4,8,5]) -> f32[4,6,5] {
  %x = f32[4,6,8]{2,1,0} parameter(0)
  %w = f32[4,8,5]{2,1,0} parameter(1)
  ROOT %y = f32[4,6,5]{2,1,0} convolution(%x, %w), window={size=4 stride=3 \
pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf
}
""".replace("\\\n", "")
  assert programs.count(text).flops == 2 * 4 * 6 * 8 * 5


def test_count_of_a_padded_convolution_leaves_out_the_padding():
  text = """
ENTRY %main (x: f32[1,4,1], w: f32[3,1,1]) -> f32[1,4,1] {
  %x = f32[1,4,1]{2,1,0} parameter(0)
  %w = f32[3,1,1]{2,1,0} parameter(1)
  ROOT %y = f32[1,4,1]{2,1,0} convolution(%x, %w), window={size=3 pad=1_1}, \
dim_labels=b0f_0io->b0f
}
""".replace("\\\n", "")
  assert programs.count(text).flops == 2 * (4 * 3 - 2)


def test_data_mesh_sends_one_all_reduce_of_the_gradient():
  layout = Layout.of("data:4", jax.devices()[:4])

  def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).sum()

  w = jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=layout.sharding())
  x = jax.ShapeDtypeStruct(
    (64, 32), jnp.float32, sharding=layout.sharding(("data", "fsdp"))
  )
  gradient = jax.jit(jax.grad(loss), out_shardings=layout.sharding())
  counts = programs.count(gradient.lower(w, x).compile())
  (sent,) = counts.collectives
  assert (sent.kind, sent.group, sent.count) == ("all-reduce", 4, 1)
  assert sent.bytes == 4 * 32 * 32
  assert not sent.crosses_slices


@pytest.mark.parametrize(
  ("groups", "expected"),
  [
    ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
    ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
    ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
    ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
  ],
)
def test_groups_of_a_collective_are_read_in_every_form(groups, expected):
  line = programs.Instruction("x", "f32[4]", "all-reduce", f"%y), {groups}")
  assert programs._groups(line) == expected


def test_collectives_name_the_slices_that_they_cross():
  class Device:
    def __init__(self, slice_index):
      self.slice_index = slice_index

  text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %near = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}
  ROOT %far = f32[8]{0} all-reduce(%near), replica_groups={{0,2},{1,3}}
}
"""
  devices = [Device(0), Device(0), Device(1), Device(1)]
  near, far = programs.count(text, devices).collectives
  assert (near.crosses_slices, far.crosses_slices) == (False, True)


def test_array_bytes_leaves_out_memory_spaces_of_the_core():
  bytes_of = functools.partial(programs.array_bytes, main_memory=True)
  assert bytes_of("f32[8,16]{1,0:T(8,128)}") == 4 * 128
  assert bytes_of("f32[8,16]{1,0:T(8,128)S(1)}") == 0
  assert (
    bytes_of("(bf16[4]{0}, pred[3]{0}, c64[2]{0}, s32[])") == 8 + 3 + 16 + 4
  )
