//! Every figure of one message of each wording, as it stands in the message.

use fraglab::import::{Advice, Amount, OomMessage, ProcessUse, Wording};

use super::{only, posted};

/// The message posted at an address that ends so.
fn at(address: &str) -> OomMessage {
    let posted = posted();
    let message = posted.iter().find(|message| message.source.ends_with(address));
    only(&message.expect(address).text).0
}

/// Bytes of a size in hundredths of a unit, and half of one hundredth.
fn hundredths(number: u64, unit_bytes: u64) -> Option<Amount> {
    let error_bytes = if unit_bytes == 1 { 0 } else { unit_bytes.div_ceil(200) };
    Some(Amount { bytes: number * unit_bytes / 100, error_bytes })
}

fn gib(number: u64) -> Option<Amount> {
    hundredths(number, 1 << 30)
}

fn mib(number: u64) -> Option<Amount> {
    hundredths(number, 1 << 20)
}

fn kib(number: u64) -> Option<Amount> {
    hundredths(number, 1 << 10)
}

#[test]
fn of_2018() {
    let message = at("pytorch/pull/13751");
    assert_eq!(message.wording, Wording::TorchCached);
    assert_eq!((message.device_kind, message.device_index), (Some("CUDA"), Some(0)));
    assert_eq!((message.requested, message.capacity), (gib(1600), gib(1193)));
    assert_eq!((message.allocated, message.free), (gib(400), gib(733)));
    assert_eq!(message.unallocated, kib(17_900));
    assert!(message.advice.is_empty());
}

#[test]
fn of_2020_and_2021() {
    let message = at("Stripformer-ECCV-2022-/issues/21");
    assert_eq!((message.wording, message.device_index), (Wording::TorchReserved, Some(1)));
    assert_eq!((message.requested, message.capacity), (gib(165), gib(779)));
    assert_eq!((message.allocated, message.free), (gib(353), gib(140)));
    assert_eq!(message.reserved, gib(528));
    // 5.28 - 3.53, and the errors of both.
    let unallocated = message.unallocated.expect("derived");
    assert_eq!(unallocated.error_bytes, 2 * 5_368_710);
    assert!(unallocated.bytes.abs_diff(175 * (1 << 30) / 100) <= 1);
    assert_eq!(message.advice, [Advice::MaxSplitSize]);
    assert!(at("pytorch/issues/35901").advice.is_empty());
}

#[test]
fn of_2023_with_the_typo_and_two_processes() {
    let message = at("pytorch/pull/99699");
    assert_eq!(message.wording, Wording::TorchUnallocated);
    // The quotation marks are line 1.
    assert_eq!((message.line, message.capacity), (2, gib(1590)));
    assert_eq!((message.requested, message.free), (mib(13_800), mib(844)));
    assert_eq!((message.allocated, message.unallocated), (gib(1412), mib(41_041)));
    assert_eq!(message.in_use_by_process, gib(1532));
    let in_use = mib(57_700).expect("a size");
    assert_eq!(message.processes, [ProcessUse { process: 1_246_069, in_use }]);
    assert_eq!(message.advice, [Advice::MaxSplitSize]);
}

#[test]
fn of_2024_with_private_pools_and_a_limit() {
    let message = at("ROCm/TheRock/issues/2118");
    assert_eq!((message.device_kind, message.device_index), (Some("HIP"), Some(0)));
    assert_eq!((message.requested, message.capacity), (mib(200), gib(28_798)));
    assert_eq!((message.free, message.allowed), (gib(27_586), gib(105)));
    assert_eq!((message.allocated, message.private_pools), (mib(101_701), mib(1700)));
    assert_eq!(message.unallocated, mib(5499));
    assert_eq!(message.advice, [Advice::ExpandableSegments]);
    let message = at("llama-cookbook/issues/949");
    assert_eq!((message.rank, message.device_index), (Some(2), Some(2)));
    // PyTorch's own advice does not mean that it is on.
    assert!(!message.names_expandable_segments);
}

#[test]
fn of_cuda_malloc_async() {
    let message = at("pytorch/issues/110194");
    assert_eq!((message.wording, message.device_index), (Wording::TorchAsync, Some(5)));
    assert_eq!((message.allocated, message.requested), (gib(5414), mib(68_641)));
    assert_eq!((message.capacity, message.free), (gib(7935), mib(2719)));
    // 2^64 bytes stand for no limit.
    assert_eq!(message.allowed, None);
}

#[test]
fn of_other_devices() {
    let npu = at("vllm-ascend/issues/19");
    assert_eq!((npu.device_kind, npu.device_index), (Some("NPU"), Some(0)));
    assert_eq!((npu.active, npu.free, npu.reserved), (gib(1024), mib(1952), gib(1065)));
    let xpu = at("intel-extension-for-pytorch/issues/846");
    assert_eq!((xpu.device_kind, xpu.free), (Some("XPU"), None));
    assert_eq!((xpu.capacity, xpu.advice), (gib(1511), vec![Advice::EmptyCache]));
    assert!(at("Docker_IPEX_ComfyUI/issues/11").is_block_limit);
    let mps = at("ComfyUI/issues/2489");
    assert_eq!((mps.wording, mps.device_kind), (Wording::Mps, Some("MPS")));
    // It says GB and counts in powers of 1024.
    assert_eq!((mps.allocated, mps.other_allocations), (gib(556), gib(110)));
    assert_eq!((mps.allowed, mps.requested), (gib(680), mib(76_800)));
    assert_eq!(mps.advice, [Advice::HighWatermark]);
    let shared = at("pinokio/issues/941");
    assert_eq!(shared.requested, Some(Amount::exact(256)));
}

#[test]
fn of_other_programs() {
    let jax = at("AFProfile/issues/8");
    assert_eq!(jax.wording, Wording::Jax);
    assert_eq!(jax.requested, Some(Amount::exact(4_770_354_232)));
    assert_eq!((jax.planned_total, jax.planned_fragmentation), (gib(1444), mib(68_030)));
    let allocating = at("LLNeRF/issues/9");
    assert_eq!(allocating.requested, Some(Amount::exact(20_029_400_304)));
    let tensorflow = at("captcha_trainer/issues/16");
    assert_eq!((tensorflow.wording, tensorflow.requested), (Wording::TensorFlow, mib(53_833)));
    let rmm = at("rmm/issues/1421");
    assert_eq!((rmm.wording, rmm.is_pool_full), (Wording::Rmm, true));
    let driver = at("vllm/issues/19186");
    assert_eq!((driver.wording, driver.rank), (Wording::Driver, Some(3)));
}

#[test]
fn a_setting_that_is_named_is_not_recommended_again() {
    let posted = posted();
    let message =
        posted.iter().find(|message| message.source.ends_with("llama-cookbook/issues/949"));
    let text = format!(
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{}",
        message.expect("posted").text
    );
    assert!(only(&text).0.names_expandable_segments);
    let screen = super::screen(&text, false);
    assert!(screen.contains("is named in this text"), "{screen}");
    assert!(!screen.contains("Set PYTORCH"), "{screen}");
}
