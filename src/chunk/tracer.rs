//! The run-time memory tracer: moments, what else lies on the GPU, who is used when (spec
//! patrickstar 2.1, 2.2, 3.1).
//!
//! A moment is an interval between two hooks. What is sampled at the end of one, in the warm-up,
//! says how much of the GPU the program itself needs then in every later step:
//!
//! ```text
//!   moment        0         1         2    ...      T-1    ADAM's chunks are used at T
//!              ├─────────┼─────────┼──── ... ───┼────────┤
//!   hook        access ^ tick: sample into slot 0, then 1, 2, ...
//!   slot t + 1 holds the peak of the operation of moment t
//! ```

use super::states::Device;

/// Moments, samples and accesses of a run.
#[derive(Clone, Debug)]
pub(super) struct Tracer {
    moment: u32,
    /// Moments of the step before.
    total: Option<u32>,
    warm_up: bool,
    /// Bytes on the GPU that are not chunks', by moment of the warm-up. Negative if chunks arrived
    /// after the peak.
    gpu_samples_bytes: Vec<i64>,
    /// Most bytes on the host that are not chunks', of the warm-up's moments.
    host_bytes_max: u64,
    /// Moments at which a chunk was used, by chunk and device, ascending.
    accesses: Vec<[Vec<u32>; 2]>,
}

/// The step has more moments than the warm-up had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoSample {
    pub(super) moment: u32,
    pub(super) known: u32,
}

impl Tracer {
    pub(super) fn new(chunks: usize) -> Tracer {
        Tracer {
            moment: 0,
            total: None,
            warm_up: true,
            gpu_samples_bytes: Vec::new(),
            host_bytes_max: 0,
            accesses: vec![[Vec::new(), Vec::new()]; chunks],
        }
    }

    pub(super) fn moment(&self) -> u32 {
        self.moment
    }

    pub(super) fn is_warm_up(&self) -> bool {
        self.warm_up
    }

    /// What the GPU held beside chunks at each moment of the warm-up, in bytes.
    pub(super) fn gpu_samples_bytes(&self) -> &[i64] {
        &self.gpu_samples_bytes
    }

    pub(super) fn gpu_bytes_max(&self) -> i64 {
        self.gpu_samples_bytes.iter().copied().max().unwrap_or(0)
    }

    pub(super) fn host_bytes_max(&self) -> u64 {
        self.host_bytes_max
    }

    /// A forward pass begins after a step. `ends_warm_up`: the step was enough of a warm-up, else
    /// it is repeated.
    pub(super) fn next_step(&mut self, ends_warm_up: bool) {
        self.total = Some(self.moment);
        self.moment = 0;
        if !self.warm_up {
            return;
        }
        self.warm_up = !ends_warm_up;
        if self.warm_up {
            *self = Tracer { total: self.total, ..Tracer::new(self.accesses.len()) };
        }
    }

    /// In the warm-up, records that the chunk is used now.
    pub(super) fn record(&mut self, chunk: u32, device: Device) {
        if self.warm_up {
            let moments = &mut self.accesses[chunk as usize][device.index()];
            if moments.last() != Some(&self.moment) {
                moments.push(self.moment);
            }
        }
    }

    /// A moment ends; in the warm-up with these samples.
    ///
    /// # Errors
    /// The warm-up did not come as far.
    pub(super) fn tick(&mut self, gpu_bytes: i64, host_bytes: u64) -> Result<(), NoSample> {
        if self.warm_up {
            self.gpu_samples_bytes.push(gpu_bytes);
            self.host_bytes_max = self.host_bytes_max.max(host_bytes);
        } else {
            self.sample(self.moment)?;
        }
        self.moment = self.moment.saturating_add(1);
        Ok(())
    }

    /// The moment after this one; after the last of a step comes the first.
    fn next_moment(&self) -> u32 {
        let next = self.moment.saturating_add(1);
        if next >= self.total.unwrap_or(u32::MAX) { 0 } else { next }
    }

    fn sample(&self, moment: u32) -> Result<i64, NoSample> {
        let known = self.gpu_samples_bytes.len() as u32;
        let sample = self.gpu_samples_bytes.get(moment as usize).copied();
        sample.ok_or(NoSample { moment, known })
    }

    /// The larger sample of this moment and the next (spec patrickstar 2.3).
    pub(super) fn gpu_bytes_now_or_next(&self) -> Result<i64, NoSample> {
        Ok(self.sample(self.moment)?.max(self.gpu_bytes_next()?))
    }

    /// The sample of the next moment (spec patrickstar 2.5).
    pub(super) fn gpu_bytes_next(&self) -> Result<i64, NoSample> {
        self.sample(self.next_moment())
    }

    /// When the chunk is used next on the device (spec patrickstar 3.1): in the warm-up 0; else the
    /// next recorded moment, or the first one of the next step, or, if it was never used there,
    /// after two steps.
    pub(super) fn next_use(&self, chunk: u32, device: Device) -> u64 {
        let total = u64::from(self.total.unwrap_or(0));
        if self.warm_up {
            return 0;
        }
        let moments = &self.accesses[chunk as usize][device.index()];
        let next = moments.partition_point(|&moment| moment <= self.moment);
        match (moments.get(next), moments.first()) {
            (Some(&next), _) => u64::from(next),
            (None, Some(&first)) => total + u64::from(first),
            (None, None) => 2 * total,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stepped(samples: &[i64], accesses: &[(u32, u32)]) -> Tracer {
        let mut tracer = Tracer::new(4);
        for (moment, &bytes) in (0..).zip(samples) {
            for &(_, chunk) in accesses.iter().filter(|&&(at, _)| at == moment) {
                tracer.record(chunk, Device::Gpu);
                tracer.record(chunk, Device::Gpu);
            }
            tracer.tick(bytes, 0).expect("warm-up");
        }
        tracer.next_step(true);
        tracer
    }

    #[test]
    fn the_next_use_is_later_in_this_step_or_in_the_next_or_never() {
        let mut tracer = stepped(&[0; 5], &[(0, 1), (3, 1), (0, 2)]);
        tracer.tick(0, 0).expect("known");
        assert_eq!(tracer.moment(), 1);
        assert_eq!(tracer.next_use(1, Device::Gpu), 3);
        assert_eq!(tracer.next_use(2, Device::Gpu), 5, "the first moment of the next step");
        assert_eq!(tracer.next_use(1, Device::Host), 10, "never used there");
        tracer.tick(0, 0).expect("known");
        tracer.tick(0, 0).expect("known");
        assert_eq!(tracer.next_use(1, Device::Gpu), 5, "a use at this moment is over");
    }

    #[test]
    fn of_two_chunks_used_one_after_the_other_the_one_just_used_leaves() {
        // Spec patrickstar 8.9: used at moments 0 and 1, T = 1.
        let mut tracer = Tracer::new(2);
        tracer.record(0, Device::Gpu);
        tracer.tick(0, 0).expect("known");
        tracer.record(1, Device::Gpu);
        tracer.next_step(true);
        let keys = |tracer: &Tracer| [0, 1].map(|chunk| tracer.next_use(chunk, Device::Gpu));
        assert_eq!(keys(&tracer), [1, 1], "a tie at moment 0: the smaller id leaves");
        tracer.tick(0, 0).expect("known");
        assert_eq!(keys(&tracer), [1, 2], "at moment 1 chunk 1 leaves");
    }

    #[test]
    fn after_the_last_moment_comes_the_first() {
        let mut tracer = stepped(&[7, 1, 2], &[]);
        assert_eq!(tracer.gpu_bytes_now_or_next(), Ok(7));
        tracer.tick(0, 0).expect("known");
        assert_eq!(tracer.gpu_bytes_now_or_next(), Ok(2));
        tracer.tick(0, 0).expect("known");
        assert_eq!(tracer.gpu_bytes_next(), Ok(7));
        tracer.tick(0, 0).expect("known");
        assert_eq!(tracer.gpu_bytes_next(), Ok(7));
        assert_eq!(tracer.tick(0, 0), Err(NoSample { moment: 3, known: 3 }));
        assert_eq!(tracer.gpu_bytes_now_or_next(), Err(NoSample { moment: 3, known: 3 }));
    }

    #[test]
    fn a_warm_up_that_did_not_count_starts_afresh() {
        let mut tracer = Tracer::new(1);
        tracer.record(0, Device::Gpu);
        tracer.tick(9, 9).expect("known");
        tracer.next_step(false);
        assert!(tracer.is_warm_up());
        assert_eq!((tracer.gpu_bytes_max(), tracer.host_bytes_max()), (0, 0));
        tracer.tick(5, 0).expect("known");
        tracer.next_step(true);
        assert_eq!(tracer.gpu_samples_bytes(), [5]);
        assert_eq!(tracer.next_use(0, Device::Gpu), 2, "not used in the warm-up that counts");
    }
}
