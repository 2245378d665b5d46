"""What is read from the text of a program."""

from jorca.planning import Operation, read_operations

TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=2

%fused_copy (p0: f32[4,8]) -> f32[4,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  ROOT %copy.1 = f32[4,8]{0,1} copy(%p0), metadata={op_name="copy(x) all-reduce(y)"}
}

%branch (arg: (s32[2], /*index=1*/f32[3])) -> f32[6] {
  %arg = (s32[2]{0}, f32[3]{0}) parameter(0)
  %x = f32[3]{0} get-tuple-element(%arg), index=1
  ROOT %all-gather.7 = f32[6]{0} all-gather(%x), channel_id=1, dimensions={0}
}

ENTRY %main (a: f16[2,3], b: f16[5]) -> f16[2,3] {
  %a = f16[2,3]{1,0} parameter(0), metadata={op_name="y = x all-gather(z"}
  %b = f16[5]{0} parameter(1)
  %all-reduce.1 = (f16[2,3]{1,0}, f16[5]{0}) all-reduce(%a, %b), channel_id=2, to_apply=%add
  %all-reduce-start.1 = ((f16[2,3]{1,0}), f16[2,3]{1,0}) all-reduce-start(%a), channel_id=3
  %all-reduce-done.1 = f16[2,3]{1,0} all-reduce-done(%all-reduce-start.1)
  %ag = ((f16[5]{0}, f16[2,3]{1,0}), (f16[10]{0}, f16[4,3]{1,0})) all-gather-start(%b, %a), channel_id=4
  %copy-start = (f16[5]{0}, f16[5]{0}, u32[]) copy-start(%b)
  %copy-done = f16[5]{0} copy-done(%copy-start)
  %kernel = (f16[7]{0}, f32[9]{0}) custom-call(%a, /*index=1*/%b), custom_call_target="a_kernel"
  ROOT %add.1 = f16[2,3]{1,0} add(%a, %all-reduce-done.1)
}
"""


def test_every_copy_exchange_and_call_is_found_once_with_what_it_makes():
    assert read_operations(TEXT) == (
        Operation("copy", ("f32[4,8]",), "", False),
        Operation("all-gather", ("f32[6]",), "", False),
        Operation("all-reduce", ("f16[2,3]", "f16[5]"), "", True),
        Operation("all-reduce", ("f16[2,3]",), "", True),
        Operation("all-gather", ("f16[10]", "f16[4,3]"), "", True),
        Operation("copy", ("f16[5]",), "", True),
        Operation("custom-call", ("f16[7]", "f32[9]"), "a_kernel", True),
    )
