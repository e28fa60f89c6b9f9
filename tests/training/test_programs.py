"""Counts of compiled programs, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxformers.training import programs
from jaxformers.training.layout import Layout


def compile_for_shapes(function, *shapes):
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return jax.jit(function).lower(*arrays).compile().as_text()


def test_count_of_a_product_is_two_operations_for_each_entry():
  program = compile_for_shapes(jnp.matmul, (64, 48), (48, 32))
  counts = programs.count(program)
  assert counts.flops == 2 * 64 * 48 * 32
  assert counts.bytes >= 4 * (64 * 48 + 48 * 32 + 64 * 32)
  assert counts.loops == ()
  assert counts.collectives == ()


@pytest.mark.parametrize(
  ("dtype", "precision", "share"),
  [("f32", "highest", 1), ("f32", "high", 0), ("bf16", "highest", 0)],
)
def test_count_tells_products_of_float32_at_the_highest_precision(
  dtype, precision, share
):
  text = f"""
ENTRY %main (x: {dtype}[64,48], w: {dtype}[48,32]) -> f32[64,32] {{
  %x = {dtype}[64,48]{{1,0}} parameter(0)
  %w = {dtype}[48,32]{{1,0}} parameter(1)
  ROOT %y = f32[64,32]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}, operand_precision={{{precision},{precision}}}
}}
"""
  counts = programs.count(text)
  assert counts.flops == 2 * 64 * 48 * 32
  assert counts.precise == share * counts.flops
  assert counts.library == 0


@pytest.mark.parametrize(("precision", "share"), [("HIGHEST", 1), ("HIGH", 0)])
def test_count_of_a_call_of_cublas_is_that_of_its_product(precision, share):
  text = f"""
ENTRY %main (x: f32[4,48,64], w: f32[4,48,32]) -> f32[4,64,32] {{
  %x = f32[4,48,64]{{2,1,0}} parameter(0)
  %w = f32[4,48,32]{{2,1,0}} parameter(1)
  %both = (f32[4,64,32]{{2,1,0}}, s8[33554432]{{0}}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config"\
:{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}},\
"precision_config":{{"operand_precision":["{precision}","{precision}"]}}}}}}
  ROOT %y = f32[4,64,32]{{2,1,0}} get-tuple-element(%both), index=0
}}
"""
  counts = programs.count(text)
  assert counts.flops == counts.library == 4 * 2 * 48 * 64 * 32
  assert counts.precise == share * counts.flops
  # The workspace of the library is not read or written.
  assert counts.bytes == 4 * 4 * (48 * 64 + 48 * 32 + 64 * 32)


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
  counts = programs.count(gradient.lower(w, x).compile().as_text())
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
  line = programs.Instruction(
    False, "x", "f32[4]", "all-reduce", f"%y), {groups}", {}
  )
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


def test_arrays_have_the_padding_of_tiles_and_their_memory():
  sizes = [(a.size, a.is_main) for a in programs.arrays("f32[64,16]{1,0}")]
  assert sizes == [(4096, True)]
  (tiled,) = programs.arrays("f32[64,16]{1,0:T(8,128)}")
  assert tiled.size == 4 * 64 * 128
  (inside,) = programs.arrays("bf16[7,256,512]{2,1,0:T(8,128)(2,1)S(1)}")
  assert (inside.size, inside.is_main) == (2 * 7 * 256 * 512, False)
  text = "(f8e4m3fn[4]{0}, pred[3]{0}, c64[2]{0}, /*index=3*/s32[])"
  assert [a.size for a in programs.arrays(text)] == [4, 3, 16, 4]


LOOP = """
%condition (s: (s32[], s32[])) -> pred[] {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %far = f32[] constant(1000)
  %k = s32[] constant({limit})
  {root}
}}
%fused (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %less = pred[] compare(%a, %b), direction=LT
}}
%body (s: (s32[], s32[])) -> (s32[], s32[]) {{
  ROOT %s = (s32[], s32[]) parameter(0)
}}
ENTRY %main (n: s32[]) -> s32[] {{
  %n = s32[] parameter(0)
  %start = s32[] constant({start})
  %state = (s32[], s32[]) tuple(%start, %n)
  %loop = (s32[], s32[]) while(%state), condition=%condition, body=%body
  ROOT %end = s32[] get-tuple-element(%loop), index=0
}}
"""


@pytest.mark.parametrize(
  ("start", "limit", "root", "trips"),
  [
    (0, 7, "compare(%i, %k), direction=LT", 7),
    (2, 7, "compare(%i, %k), direction=LT", 5),
    # JAX writes no such loop: the number is unknown.
    (9, 0, "compare(%i, %k), direction=GT", 0),
    (0, 7, "fusion(%i, %k), kind=kLoop, calls=%fused", 7),
    (0, 7, "compare(%i, %n), direction=LT", 0),
  ],
)
def test_trips_of_a_loop_follow_from_its_condition(start, limit, root, trips):
  root = f"ROOT %go = pred[] {root}"
  text = LOOP.format(start=start, limit=limit, root=root)
  assert programs.count(text).loops == (trips,)


def entry(*lines, before=""):
  """Returns a program whose entry has some lines, and reads x [64, 256]."""
  body = "\n".join(f"  {line}" for line in lines)
  return f"""{before}
ENTRY %main (x: f32[64,256]) -> f32[1] {{
  %x = f32[64,256]{{1,0}} parameter(0)
  %i = s32[] constant(0)
{body}
}}
"""


ROW, ALL = 4 * 256, 4 * 64 * 256


@pytest.mark.parametrize(
  ("lines", "expected"),
  [
    (["%y = f32[64,256]{1,0} negate(%x)"], 2 * ALL),
    (["%y = f32[64,256]{1,0:S(1)} negate(%x)"], ALL),
    (["%y = f32[1,256]{1,0} dynamic-slice(%x, %i, %i)"], 2 * ROW),
    (
      [
        "%u = f32[1,256]{1,0:S(1)} broadcast(%i)",
        "%y = f32[64,256]{1,0} dynamic-update-slice(%x, %u, %i, %i)",
      ],
      ROW + 4,  # The row, and the scalar of the broadcast.
    ),
    (
      [
        "%s = (f32[64,256]{1,0:S(1)}, f32[64,256]{1,0}, u32[]) copy-start(%x)",
        "%y = f32[64,256]{1,0:S(1)} copy-done(%s)",
      ],
      ALL,
    ),
    (
      [
        "%s = ((f32[64,256]{1,0}), f32[16,256]{1,0:S(1)}, s32[]{:S(2)}) "
        "slice-start(%x), slice={[0:16], [0:256]}",
        "%y = f32[16,256]{1,0:S(1)} slice-done(%s)",
      ],
      ALL // 4,
    ),
    (
      ['%y = f32[9]{0} custom-call(), custom_call_target="AllocateBuffer"'],
      0,
    ),
  ],
)
def test_bytes_of_an_instruction_are_those_of_the_main_memory(lines, expected):
  assert programs.count(entry(*lines)).bytes == expected


SLICED = """
%inner (p: f32[64,256], k: s32[]) -> f32[1,256] {
  %p = f32[64,256]{1,0} parameter(0)
  %k = s32[] parameter(1)
  ROOT %row = f32[1,256]{1,0} dynamic-slice(%p, %k, %k)
}
%outer (a: f32[64,256], b: s32[]) -> f32[1,256] {
  %a = f32[64,256]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %same = f32[64,256]{1,0} bitcast(%a)
  %taken = f32[1,256]{1,0} fusion(%same, %b), kind=kLoop, calls=%inner
  ROOT %y = f32[1,256]{1,0} negate(%taken)
}
%update (a: bf16[64,256], v: f32[1,256], b: s32[]) -> bf16[64,256] {
  %a = bf16[64,256]{1,0} parameter(0)
  %v = f32[1,256]{1,0} parameter(1)
  %b = s32[] parameter(2)
  %short = bf16[1,256]{1,0} convert(%v)
  ROOT %u = bf16[64,256]{1,0} dynamic-update-slice(%a, %short, %b, %b)
}
"""


def test_bytes_of_a_fusion_that_slices_are_those_of_the_slice():
  call = "fusion(%x, %i), kind=kLoop, calls=%outer"
  text = entry(f"%y = f32[1,256]{{1,0}} {call}", before=SLICED)
  assert programs.count(text).bytes == 2 * ROW + 4


def test_bytes_of_a_fusion_that_updates_in_place_are_those_of_the_row():
  text = entry(
    "%h = bf16[64,256]{1,0:S(1)} convert(%i)",
    "%v = f32[1,256]{1,0:S(1)} convert(%i)",
    "%y = bf16[64,256]{1,0} fusion(%h, %v, %i), kind=kLoop, calls=%update",
    before=SLICED,
  )
  assert programs.count(text).bytes == ROW // 2 + 4 + 2 * 4


UPDATED = """
%more (a: f32[64,256], v: f32[1,256], b: s32[]) -> f32[64,256] {
  %a = f32[64,256]{1,0} parameter(0)
  %v = f32[1,256]{1,0} parameter(1)
  %b = s32[] parameter(2)
  %u = f32[64,256]{1,0} dynamic-update-slice(%a, %v, %b, %b)
  ROOT %y = f32[64,256]{1,0} negate(%u)
}
%made (a: f32[64,256], v: f32[1,256], b: s32[]) -> f32[64,256] {
  %a = f32[64,256]{1,0} parameter(0)
  %v = f32[1,256]{1,0} parameter(1)
  %b = s32[] parameter(2)
  %x = f32[64,256]{1,0} broadcast(%b), dimensions={}
  ROOT %u = f32[64,256]{1,0} dynamic-update-slice(%x, %v, %b, %b)
}
"""


@pytest.mark.parametrize(("called", "passes"), [("more", 2), ("made", 1)])
def test_only_an_array_from_outside_a_fusion_is_updated_in_place(
  called, passes
):
  text = entry(
    "%v = f32[1,256]{1,0:S(1)} convert(%i)",
    f"%y = f32[64,256]{{1,0}} fusion(%x, %v, %i), kind=kLoop, calls=%{called}",
    before=UPDATED,
  )
  assert programs.count(text).bytes == passes * ALL + 2 * 4  # And the scalar.


@pytest.mark.parametrize(
  ("started", "kind", "done", "expected"),
  [
    ("", "all-gather", "f32[64,256]{1,0}", ALL),
    (
      "(f32[16,256]{1,0}, f32[64,256]{1,0})",
      "all-gather",
      "f32[64,256]{1,0}",
      ALL,
    ),
    ("f32[64,256]{1,0}", "all-reduce", "f32[64,256]{1,0}", ALL),
    (
      "(f32[64,256]{1,0}, f32[2,256]{1,0})",
      "all-reduce",
      "(f32[64,256]{1,0}, f32[2,256]{1,0})",
      ALL + 2 * ROW,
    ),
    (
      "((f32[64,256]{1,0}), f32[16,256]{1,0})",
      "reduce-scatter",
      "f32[16,256]{1,0}",
      ALL // 4,
    ),
    (
      "(f32[64,256]{1,0}, f32[64,256]{1,0}, u32[], u32[])",
      "collective-permute",
      "f32[64,256]{1,0}",
      ALL,
    ),
  ],
)
def test_collectives_count_their_result_once(started, kind, done, expected):
  call = f"{kind}(%x), replica_groups={{{{0,1,2,3}}}}"
  lines = [f"%y = {done} {call}"]
  if started:
    call = call.replace(kind, f"{kind}-start")
    lines = [f"%s = {started} {call}", f"%y = {done} {kind}-done(%s)"]
  counts = programs.count(entry(*lines))
  (sent,) = counts.collectives
  assert (sent.kind, sent.count, sent.bytes) == (kind, 1, expected)
  assert counts.bytes == ALL + expected  # Reads x, and writes the result.


PRODUCT = """
%product (p: f32[64,256]) -> f32[64,64] {
  %p = f32[64,256]{1,0} parameter(0)
  ROOT %d = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}
"""


@pytest.mark.parametrize("kind", ["fusion", "call", "async"])
def test_an_asynchronous_product_is_counted_once(kind):
  lines = [
    f"%s = ((f32[64,256]), f32[64,64], u32[]) {kind}-start(%x), calls=%product",
    f"%u = ((f32[64,256]), f32[64,64], u32[]) {kind}-update(%s)",
    f"%y = f32[64,64]{{1,0}} {kind}-done(%u)",
  ]
  counts = programs.count(entry(*lines, before=PRODUCT))
  assert counts.flops == 2 * 64 * 64 * 256
  # So is a sum over devices.
  root = "dot(%p, %p), lhs_contracting_dims={1}"
  summed = PRODUCT.replace(root, "all-reduce(%p), replica_groups={{0,1}}")
  (sent,) = programs.count(entry(*lines, before=summed)).collectives
  assert (sent.kind, sent.count) == ("all-reduce", 1)


def test_data_that_hosts_send_between_slices_is_counted():
  # As libtpu writes it for two slices of four chips.
  exchange = (
    "is_host_transfer=true, frontend_attributes={_xla_megascale_target="
    '{target},_xla_megascale_transfer_type="{kind}"}'
  )

  def sent(target, kind):
    form = exchange.replace("{target}", target).replace("{kind}", kind)
    text = entry(
      "%t = token[] after-all()",
      f"%s = (f32[64,256]{{1,0}}, u32[], token[]) send(%x, %t), {form}",
      f"%r = (f32[64,256]{{1,0}}, u32[], token[]) recv(%t), {form}",
      "%a = token[] send-done(%s), is_host_transfer=true",
      "%b = (f32[64,256]{1,0}, token[]) recv-done(%r), is_host_transfer=true",
    )
    (collective,) = programs.count(text).collectives
    return collective

  summed = sent('"{1,2}x{0:3}"', "ALL_REDUCE")
  assert summed == programs.Collective("all-reduce", 2, True, 1, ALL)
  gathered = sent("{{100000,200000,300000},{100001,200001}}", "ALL_GATHER")
  assert gathered == programs.Collective("all-gather", 3, True, 1, ALL)
  moved = sent("{{100003->200000},{200003->100000}}", "ONE_TO_ONE")
  assert moved == programs.Collective("collective-permute", 2, True, 1, ALL)


def test_a_sliced_all_reduce_in_a_fusion_is_a_reduce_scatter():
  before = """
%scatter (p: f32[64,256]) -> f32[16,256] {
  %p = f32[64,256]{1,0} parameter(0)
  %all = f32[64,256]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}
  %k = s32[] constant(0)
  ROOT %part = f32[16,256]{1,0} dynamic-slice(%all, %k, %k)
}
"""
  line = "%y = f32[16,256]{1,0} fusion(%x), kind=kCustom, calls=%scatter"
  (sent,) = programs.count(entry(line, before=before)).collectives
  assert (sent.kind, sent.group, sent.bytes) == ("reduce-scatter", 4, ALL // 4)
  # The sum of a slice is a sum.
  before = """
%summed (p: f32[64,256]) -> f32[16,256] {
  %p = f32[64,256]{1,0} parameter(0)
  %k = s32[] constant(0)
  %part = f32[16,256]{1,0} dynamic-slice(%p, %k, %k)
  ROOT %all = f32[16,256]{1,0} all-reduce(%part), replica_groups={{0,1,2,3}}
}
"""
  line = line.replace("scatter", "summed")
  (sent,) = programs.count(entry(line, before=before)).collectives
  assert (sent.kind, sent.group, sent.bytes) == ("all-reduce", 4, ALL // 4)


def test_empty_groups_are_all_devices():
  text = entry("%y = f32[64,256]{1,0} all-reduce(%x), replica_groups={}")
  (sent,) = programs.count(text, 8 * [None]).collectives
  assert sent.group == 8
