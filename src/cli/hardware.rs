//! What `run` asks of a real GPU: which one, how fast, and what to write into its memory.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;

use super::setup::SetupArgs;
use crate::device::cuda::{Cuda, CudaError};
use crate::device::{
    CallTime, Device, DeviceCall, Limited, Measured, MemoryInfo, Touch, WARM_UP_TIME, warm_up,
};
use crate::engine::{Card, CardSummary, HardwareError, Pace};
use crate::metrics::TouchMode;
use crate::trace::Trace;
use crate::units::whole_number;

/// How long memory that was freed a moment ago is left alone before a pass. The driver clears it
/// meanwhile; who asks for it at once waits for that, 7 ms now and then on an H200.
const SETTLE_TIME: Duration = Duration::from_millis(200);

const TOUCH_HELP: &str = "\
Write a pattern into every block when it is handed out, and check it when its memory is free again

Two blocks that share memory, or a block whose memory is not all there, are then found by the GPU \
itself. edges: the first and the last 4 KiB of a block, and the first 4 bytes of up to 14 pages of \
2 MiB in between (all of a block up to 64 KiB). full: every byte. The blocks that live when the \
trace ends are checked then. Happens between the driver's calls and is left out of all times. A \
block that does not hold its pattern makes the run `failed` and the exit code 1; memory that is \
not there ends the run and all that would come after it, with exit code 2.";

const DEVICE_HELP: &str = "\
Where to replay: sim, or cuda[:N] for a real GPU

On a GPU every call of the allocators is the driver's own, in the order of the trace, and a clock \
runs around each. Before every pass memory that was just freed gets 0.2 s to be cleared, and the \
card is warmed up, as an idle one is slow, by 0.15 s of calls that do not count. The same cell is simulated beside it: the table shows both. The capacity is \
--capacity, else that of a trace that names one, else what the GPU has free. A recording that \
starts late begins with its blocks asked for. Cells run one after the other.";

const REPEATS_HELP: &str = "\
Replay N times and tell the pass whose calls took the median time; --device cuda only

Passes over one trace differ by tenths, as calls wait for memory to be cleared. All that is told \
is of the one pass; wall.repeats of the JSON has the least and the most time of all passes. A pass in \
which a block did not hold its pattern is the last, and the one that is told.";

/// A real GPU, as typed.
#[derive(Debug, clap::Args)]
pub(super) struct HardwareArgs {
    /// Where to replay: sim, or cuda[:N] for a real GPU
    #[arg(long, value_name = "DEVICE", default_value = "sim", value_parser = parse_place)]
    #[arg(long_help = DEVICE_HELP)]
    device: Place,

    /// Write a pattern into every block and check it when it is freed; --device cuda only
    #[arg(long, value_enum, value_name = "HOW", default_value = "none", long_help = TOUCH_HELP)]
    touch: TouchHow,

    /// When the events take place; --device cuda only
    #[arg(long, value_enum, value_name = "PACE", default_value = "fast")]
    pace: PaceHow,

    /// Replay N times and tell the pass whose calls took the median time; --device cuda only
    #[arg(long, value_name = "N", default_value = "1", long_help = REPEATS_HELP)]
    #[arg(value_parser = clap::value_parser!(NonZeroU32))]
    repeats: NonZeroU32,
}

/// `sim`, `cuda`, `cuda:1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Sim,
    Cuda(u32),
}

fn parse_place(text: &str) -> Result<Place, String> {
    if text == "sim" {
        return Ok(Place::Sim);
    }
    let ordinal = gpu_ordinal(text).map(Place::Cuda);
    ordinal.ok_or_else(|| "expected sim, cuda or cuda:N, as in cuda:0".to_owned())
}

/// The number of the GPU that `cuda` or `cuda:N` names.
pub(super) fn gpu_ordinal(text: &str) -> Option<u32> {
    match text {
        "cuda" => Some(0),
        _ => text.strip_prefix("cuda:").and_then(whole_number)?.try_into().ok(),
    }
}

/// How much of every block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TouchHow {
    /// Nothing
    None,
    /// Both ends, and a word of some pages in between
    Edges,
    /// All of it
    Full,
}

/// When events take place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PaceHow {
    /// One right after the other
    Fast,
    /// Not before their recorded time
    Recorded,
}

/// A GPU, and how to replay on it.
pub(super) struct GpuPlan {
    /// The GPU.
    pub(super) card: CudaCard,
    /// How much of every block is written.
    pub(super) touch: TouchMode,
    /// When events take place.
    pub(super) pace: Pace,
    /// How often.
    pub(super) passes: NonZeroU32,
}

impl HardwareArgs {
    /// Opens the GPU, if one is asked for.
    ///
    /// # Errors
    /// If there is none, or flags of a simulated device are given with it, or its flags without it.
    pub(super) fn open(
        &self,
        setup: &SetupArgs,
        has_address_seeds: bool,
    ) -> anyhow::Result<Option<GpuPlan>> {
        let Place::Cuda(ordinal) = self.device else {
            anyhow::ensure!(
                self.touch == TouchHow::None,
                "--touch needs --device cuda: there is nothing to write to in a simulated device"
            );
            anyhow::ensure!(
                self.pace == PaceHow::Fast,
                "--pace needs --device cuda: a simulated device waits for nothing"
            );
            anyhow::ensure!(
                self.repeats == NonZeroU32::MIN,
                "--repeats needs --device cuda: a simulated device is the same every time"
            );
            return Ok(None);
        };
        let simulated = has_address_seeds.then_some("--address-seeds");
        if let Some(flag) = simulated.or(setup.flag_of_simulated_device()) {
            anyhow::bail!("{flag} does not go with --device cuda: there the driver decides");
        }
        let card = CudaCard::open(ordinal).with_context(|| format!("--device cuda:{ordinal}"))?;
        let touch = match self.touch {
            TouchHow::None => TouchMode::None,
            TouchHow::Edges => TouchMode::Edges,
            TouchHow::Full => TouchMode::Full,
        };
        let pace = match self.pace {
            PaceHow::Fast => Pace::Fast,
            PaceHow::Recorded => Pace::Recorded,
        };
        Ok(Some(GpuPlan { card, touch, pace, passes: self.repeats }))
    }
}

/// A replay that waits longer than this is told of before it begins.
const WAIT_TOLD: Duration = Duration::from_secs(60);

impl GpuPlan {
    /// How long so many replays of a trace wait for recorded times, in words, where that is long: a
    /// trace may say anything of time, years too.
    pub(super) fn long_wait(&self, trace: &Trace, replays: usize) -> Option<String> {
        let (first, last) =
            (trace.events.first()?, trace.events.iter().map(|it| it.time_ns).max()?);
        let each = Duration::from_nanos(last.saturating_sub(first.time_ns));
        if self.pace == Pace::Fast || each < WAIT_TOLD {
            return None;
        }
        let day_seconds = 24 * 60 * 60;
        let whole = |seconds: u64| {
            if seconds > day_seconds { seconds / day_seconds * day_seconds } else { seconds }
        };
        let time = humantime::format_duration(Duration::from_secs(whole(each.as_secs())));
        let count = replays.saturating_mul(self.passes.get() as usize);
        let times = if count == 1 { String::new() } else { format!(", {count} times") };
        Some(format!("--pace recorded takes {time}{times}; --pace fast waits for nothing"))
    }
}

/// A GPU of this machine. Holds it open, so that opening a device on it again is quick and finds
/// the same memory free.
pub(super) struct CudaCard {
    cuda: Cuda,
    /// Nothing works on it any more.
    is_lost: Cell<bool>,
}

impl CudaCard {
    fn open(ordinal: u32) -> Result<CudaCard, CudaError> {
        Ok(CudaCard { cuda: Cuda::open(ordinal)?, is_lost: Cell::new(false) })
    }

    /// Learns how a replay on it ended: some errors end all work on the card. After another, as
    /// that of a call which this GPU does not support, the next replay may do well.
    pub(super) fn learn(&self, error: &HardwareError) {
        let is_lost = match error {
            HardwareError::Card(_) => false,
            HardwareError::Touch { .. } => true,
            HardwareError::Driver { call, .. } => {
                call.error.is_lasting() || self.cuda.synchronize().is_err()
            }
        };
        self.is_lost.set(self.is_lost() || is_lost);
    }

    /// Whether a replay showed that nothing works on it any more.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.get()
    }
}

impl Card for CudaCard {
    type Device = Limited<Measured<Cuda>>;

    fn open(&self, capacity_bytes: Option<u64>) -> Result<Self::Device, HardwareError> {
        let info = self.cuda.info();
        let cuda = Cuda::open(info.ordinal).map_err(of_card)?;
        Ok(Limited::new(Measured::new(cuda), capacity_bytes.unwrap_or(info.total_bytes)))
    }

    fn warm_up(&self) {
        std::thread::sleep(SETTLE_TIME);
        let Ok(cuda) = Cuda::open(self.cuda.info().ordinal) else { return };
        let mut touch = cuda.toucher().ok();
        warm_up(cuda, touch.as_mut().map(|touch| touch as &mut dyn Touch), WARM_UP_TIME);
    }

    fn toucher(&self, device: &Self::Device) -> Result<Box<dyn Touch>, HardwareError> {
        let toucher = device.inner().inner().toucher().map_err(of_card)?;
        Ok(Box::new(toucher))
    }

    fn measured(&self, device: &Self::Device, call: DeviceCall) -> CallTime {
        device.inner().calls().of(call)
    }

    fn memory_info(&self) -> MemoryInfo {
        self.cuda.memory_info()
    }

    fn summary(&self) -> CardSummary {
        let info = self.cuda.info();
        CardSummary { name: info.name.clone(), driver: info.driver.clone(), ordinal: info.ordinal }
    }
}

fn of_card(error: CudaError) -> HardwareError {
    HardwareError::Card(Box::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_have_names() {
        assert_eq!(parse_place("sim"), Ok(Place::Sim));
        assert_eq!(parse_place("cuda"), Ok(Place::Cuda(0)));
        assert_eq!(parse_place("cuda:3"), Ok(Place::Cuda(3)));
        for wrong in ["cuda:", "cuda:-1", "cuda:99999999999", "gpu", "CUDA"] {
            assert!(parse_place(wrong).is_err(), "{wrong}");
        }
    }
}
