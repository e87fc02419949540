//! Memory lines of training logs, as posted, and curves with a known answer.

use fraglab::import::{CurveClass, Framework, MemoryText};

use super::screen;

const GI: u64 = 1 << 30;

/// DeepSpeed#522, comment of 2022-02-21.
const DEEPSPEED: &str = "\
[2022-02-21 23:37:48,850] [INFO] [utils.py:822:see_memory_usage] before forward 1
[2022-02-21 23:37:48,850] [INFO] [utils.py:827:see_memory_usage] MA 4.89 GB         Max_MA 4.89 GB         CA 6.68 GB         Max_CA 7 GB
[2022-02-21 23:37:48,851] [INFO] [utils.py:832:see_memory_usage] CPU Virtual Memory:  used = 50.45 GB, percent = 40.2%
[2022-02-21 23:37:49,246] [INFO] [utils.py:822:see_memory_usage] before backward 1
[2022-02-21 23:37:49,246] [INFO] [utils.py:827:see_memory_usage] MA 5.19 GB         Max_MA 5.31 GB         CA 6.68 GB         Max_CA 7 GB
";

/// Megatron-LM#60.
const MEGATRON: &str = "\
 iteration        5/  120000 | elapsed time per iteration (ms): 16491.5 | learning rate: 0.000E+00
after 5 iterations memory (MB) | allocated: 10250.5693359375 | max allocated: 12606.06201171875 | reserved: 17482.0 | max reserved: 17482.0
";

/// torchtune#2406, the first steps.
const TORCHTUNE: &str = "\
Step 1 | loss:2.4555773735046387 lr:2e-05 tokens_per_second_per_gpu:46.73149108886719 peak_memory_active:47.32469987869263 peak_memory_alloc:52.001708984375 peak_memory_reserved:52.001708984375 
Step 2 | loss:1.4622046947479248 lr:2e-05 tokens_per_second_per_gpu:45.71133041381836 peak_memory_active:47.32469987869263 peak_memory_alloc:53.99104309082031 peak_memory_reserved:53.99104309082031 
Step 3 | loss:1.7121436595916748 lr:2e-05 tokens_per_second_per_gpu:45.4216423034668 peak_memory_active:47.32469987869263 peak_memory_alloc:54.96961975097656 peak_memory_reserved:54.96961975097656 
Step 4 | loss:1.1561416387557983 lr:2e-05 tokens_per_second_per_gpu:40.134742736816406 peak_memory_active:47.32469987869263 peak_memory_alloc:55.948211669921875 peak_memory_reserved:55.948211669921875 
Step 5 | loss:1.0250656604766846 lr:2e-05 tokens_per_second_per_gpu:23.665254592895508 peak_memory_active:47.32469940185547 peak_memory_alloc:56.93070983886719 peak_memory_reserved:56.93070983886719 
Step 6 | loss:1.046566128730774 lr:2e-05 tokens_per_second_per_gpu:55.77537155151367 peak_memory_active:47.32488775253296 peak_memory_alloc:57.90928649902344 peak_memory_reserved:57.90928649902344 
";

/// llama-cookbook#206.
const LLAMA: &str = "\
Max CUDA memory allocated was 18 GB
Max CUDA memory reserved was 28 GB
Peak active CUDA memory was 18 GB
Cuda Malloc retires : 0
CPU Total Peak Memory consumed during the train (max): 4 GB
";

#[test]
fn posted_logs_are_read() {
    let found = MemoryText::read(&[DEEPSPEED, MEGATRON, LLAMA].concat());
    let told: Vec<(Framework, usize)> =
        found.curves.iter().map(|curve| (curve.framework, curve.rows.len())).collect();
    let expected =
        [(Framework::Deepspeed, 2), (Framework::Megatron, 1), (Framework::LlamaRecipes, 1)];
    assert_eq!(told, expected);
    let deepspeed = &found.curves[0];
    assert_eq!(deepspeed.rows[1].label.as_deref(), Some("before backward 1"));
    assert_eq!(deepspeed.rows[1].allocated.expect("told").bytes, 519 * GI / 100);
    let megatron = &found.curves[1];
    assert_eq!((megatron.rows[0].step, megatron.rows[0].line), (Some(5), 7));
    assert_eq!(megatron.rows[0].reserved.expect("told").bytes, 17_482 << 20);
    // 12,606.06 of 17,482 MB: 72.1 %.
    let diagnosis = megatron.diagnose(None);
    assert!((diagnosis.utilization.expect("told") - 0.7211).abs() < 1e-4);
    assert_eq!(diagnosis.class, CurveClass::Fragmentation);
    // 18 of 28 GB.
    let diagnosis = found.curves[2].diagnose(None);
    assert!((diagnosis.utilization.expect("told") - 18.0 / 28.0).abs() < 1e-9);
}

/// About 0.98 GiB a step from step 2 on, all of it live: a leak (the fix counts them wrongly).
#[test]
fn a_posted_log_that_grows_is_forecast() {
    let found = MemoryText::read(TORCHTUNE);
    let diagnosis = found.curves[0].diagnose(Some(64 * GI));
    assert_eq!(diagnosis.class, CurveClass::GrowingLive);
    let growth = diagnosis.growth.expect("five steps");
    assert_eq!((growth.from_step, growth.to_step), (2, 6));
    let per_step = growth.reserved_bytes_per_step / GI as f64;
    assert!((per_step - 0.98).abs() < 0.01, "{per_step}");
    // 57.909 GiB at step 6; 6.091 more at 0.98 a step take seven steps.
    assert_eq!(growth.full_at_step, Some(13));
}

#[test]
fn ranks_are_curves_of_their_own() {
    let line = |rank: u32, step: u32, reserved: u32| {
        format!(
            "[Rank {rank}] (after {step} iterations) memory (MB) | allocated: 1000.0 | max \
             allocated: 2000.0 | reserved: {reserved}.0 | max reserved: {reserved}.0\n"
        )
    };
    let text: String =
        (1..=12).flat_map(|step| [line(0, step, 4000), line(1, step, 4000 + 100 * step)]).collect();
    let found = MemoryText::read(&text);
    let classes: Vec<_> =
        found.curves.iter().map(|curve| (curve.rank, curve.diagnose(None).class)).collect();
    let expected = [(Some(0), CurveClass::Fragmentation), (Some(1), CurveClass::GrowingStranded)];
    assert_eq!(classes, expected);
    let screen = screen(&text, false);
    assert!(screen.contains("rank 0") && screen.contains("rank 1"), "{screen}");
    assert!(screen.lines().count() <= 25, "{screen}");
    assert!(super::screen(&text, true).contains("3.91 GiB"), "4000 MB are 3.91 GiB");
}
