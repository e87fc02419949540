//! What ZeRO's stages divide, and what they leave alone, whatever the number of ranks.

use fraglab::trace::{LiveByRole, Role};
use fraglab::workload::{generate, read_job};

/// A Llama whose widths every number of ranks below divides.
const JOB: &str = r#"
[model]
type = "llama"
layers = 3
hidden = 768
heads = 12
ffn = 1536
vocabulary = 2400
[train]
batch = 2
sequence = 256
steps = 2
[strategy]
recompute = "full"
"#;

/// Own peaks of roles under a stage, a type of weights and a number of ranks.
fn peaks(zero: u64, dtype: &str, ranks: u64) -> Vec<u64> {
    let sets = [
        ("strategy.zero".to_owned(), zero.to_string()),
        ("train.dtype".to_owned(), format!("\"{dtype}\"")),
        ("parallel.data".to_owned(), ranks.to_string()),
    ];
    let trace = generate(&read_job(JOB, &sets).expect("a job")).expect("a trace");
    LiveByRole::of(&trace).peak_bytes.to_vec()
}

/// Checkpoints are the same for every stage and number of ranks; optimizer state is divided from
/// stage 1 on, parameters in stage 3. Small vectors and step counts leave up to a hundredth.
#[test]
fn stages_divide_what_they_should_and_nothing_else() {
    for dtype in ["bf16", "fp32"] {
        let whole = peaks(0, dtype, 1);
        let near = |role: Role, bytes: u64, share: u64| {
            let expected = whole[role as usize] / share;
            assert!(expected > 0, "{role:?} is never live");
            let off = bytes.abs_diff(expected);
            assert!(100 * off <= expected, "{dtype}: {role:?} {bytes}, expected {expected}");
        };
        for ranks in [2, 3, 4, 8] {
            for zero in 0..=3 {
                let peaks = peaks(zero, dtype, ranks);
                let of = |role: Role| peaks[role as usize];
                near(Role::Checkpoint, of(Role::Checkpoint), 1);
                near(Role::Optimizer, of(Role::Optimizer), if zero >= 1 { ranks } else { 1 });
                near(Role::Parameter, of(Role::Parameter), if zero >= 3 { ranks } else { 1 });
                assert!(of(Role::Activation) > 0 && of(Role::Gradient) > 0, "zero {zero}");
            }
        }
    }
}
