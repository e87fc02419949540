//! Pseudo-random numbers that are the same everywhere: splitmix64.

/// A generator of 64 random bits at a time (Steele, Lea, Flood: "Fast splittable pseudorandom
/// number generators", 2014). Enough to break ties and to draw sizes; not for secrets.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// A generator whose numbers depend on the seed alone.
    pub(crate) fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// A generator whose numbers depend on all of these.
    pub(crate) fn of(seeds: &[u64]) -> Random {
        Random::new(seeds.iter().fold(0, |state, &seed| Random::new(state ^ seed).bits()))
    }

    /// The next 64 bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// A number below `bound`, which is above 0. The bias is below `bound / 2^64`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `[0, 1)`, of 53 bits.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Spreads 64 bits: the last step of splitmix64.
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::Random;

    /// First outputs for seed 1234567, as the reference implementation in C prints them.
    #[test]
    fn bits_are_those_of_splitmix64() {
        let mut random = Random::new(1_234_567);
        let bits = [random.bits(), random.bits(), random.bits()];
        assert_eq!(bits, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn numbers_stay_below_their_bound_and_reach_it() {
        let mut random = Random::new(3);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[random.below(7) as usize] = true;
            assert!((0.0..1.0).contains(&random.unit()));
        }
        assert_eq!(seen, [true; 7]);
    }
}
