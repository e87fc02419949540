//! Random programs on random machines, and smaller ones that still differ.

use super::model::{Options, Quirks, pack};
use super::program::{Layer, Program, Unit};
use crate::model::random::Random;

/// A program, and the machine and options it runs with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) program: Program,
    pub(crate) options: Options,
}

impl Case {
    pub(crate) fn random(seed: u64) -> Case {
        let random = &mut Random::new(seed);
        let chunk_elements = random.pick(&[20, 60, 100]);
        let units = units(random, chunk_elements);
        let layers = layers(random, units.len(), 2 * chunk_elements);
        let mut program = Program {
            units,
            layers,
            constant_bytes: if random.percent(20) {
                random.range(1..=4 * chunk_elements)
            } else {
                0
            },
            steps: random.range(3..=4) as u32,
            skipped: Vec::new(),
        };
        if random.percent(15) {
            let steps = 0..program.steps;
            program.skipped = steps.filter(|&step| random.percent(60 - 15 * step as u64)).collect();
        }
        let options = options(random, &program, chunk_elements);
        Case { program, options }
    }

    /// The smallest case found that still `differs`, by taking away what can go.
    pub(crate) fn shrunk(self, differs: impl Fn(&Case) -> bool) -> Case {
        let mut case = self;
        loop {
            let smaller = case.smaller();
            let Some(next) = smaller.into_iter().find(|next| next != &case && differs(next)) else {
                return case;
            };
            case = next;
        }
    }

    fn smaller(&self) -> Vec<Case> {
        let mut all = Vec::new();
        let mut with = |change: &dyn Fn(&mut Case)| {
            let mut case = self.clone();
            change(&mut case);
            all.push(case);
        };
        for layer in 0..self.program.layers.len() {
            with(&|case| case.program.remove_layer(layer));
        }
        with(&|case| case.program.steps = case.program.steps.saturating_sub(1).max(1));
        with(&|case| case.program.skipped.clear());
        with(&|case| case.program.constant_bytes = 0);
        with(&|case| case.options.ranks_down(1));
        with(&|case| case.options.ranks_down(2));
        with(&|case| case.options.local_ranks = 1);
        with(&|case| case.options.cache = false);
        with(&|case| case.options.hybrid = false);
        with(&|case| case.options.saving = false);
        with(&|case| case.options.monitor = true);
        with(&|case| case.options.fixed_split = false);
        with(&|case| case.options.shared_gpu = false);
        with(&|case| case.options.overall_gpu = 1000);
        with(&|case| case.options.overall_cpu = 1000);
        with(&|case| case.options.warmup = 1000);
        with(&|case| case.options.margin_use = 1000);
        with(&|case| case.options.host_bytes = 1 << 40);
        if self.options.quirks != Quirks::ALL {
            with(&|case| case.options.quirks = Quirks::ALL);
            for quirk in 0..Quirks::COUNT {
                with(&|case| case.options.quirks.switch_on(quirk));
            }
        }
        for layer in 0..self.program.layers.len() {
            with(&|case| case.program.layers[layer].recompute = false);
            with(&|case| case.program.layers[layer].kept_bytes = 0);
            with(&|case| case.program.layers[layer].saved_bytes = 0);
            with(&|case| case.program.layers[layer].working_bytes = 0);
        }
        for unit in 0..self.program.units.len() {
            with(&|case| case.program.units[unit].leaf = false);
            with(&|case| case.program.units[unit].host = false);
            with(&|case| {
                let unit = &mut case.program.units[unit];
                unit.parameters = vec![unit.parameters.iter().sum()];
            });
        }
        all
    }
}

impl Options {
    pub(crate) fn ranks_down(&mut self, ranks: u64) {
        self.ranks = self.ranks.min(ranks);
        self.local_ranks = self.local_ranks.min(ranks);
        self.rank = self.rank.min(ranks - 1);
    }
}

impl Program {
    /// About the highest that S comes to.
    fn other_bytes(&self) -> u64 {
        let saved = |layer: &Layer| layer.saved_bytes * layer.units.len() as u64;
        let kept = self.layers.iter().map(|layer| match layer.recompute {
            true => layer.kept_bytes,
            false => layer.kept_bytes + saved(layer),
        });
        let passing = self.layers.iter().map(|layer| match layer.recompute {
            true => layer.working_bytes + saved(layer),
            false => layer.working_bytes,
        });
        let gradients = self.units.iter().map(|unit| 2 * unit.parameters.iter().sum::<u64>());
        let most = passing.max().unwrap_or(0) + gradients.max().unwrap_or(0);
        self.constant_bytes + kept.sum::<u64>() + most
    }

    fn remove_layer(&mut self, layer: usize) {
        if self.layers.len() == 1 {
            return;
        }
        let gone = self.layers.remove(layer).units;
        let kept: Vec<usize> = (0..self.units.len()).filter(|unit| !gone.contains(unit)).collect();
        self.units = kept.iter().map(|&unit| self.units[unit].clone()).collect();
        let number = |unit: &usize| kept.iter().position(|kept| kept == unit);
        for layer in &mut self.layers {
            layer.units = layer.units.iter().filter_map(number).collect();
        }
    }
}

/// A unit each chunk, several units a chunk, or anything.
fn units(random: &mut Random, chunk_elements: u64) -> Vec<Unit> {
    let count = random.range(1..=14);
    let whole = random.percent(25);
    let largest = random.pick(&[chunk_elements / 4, chunk_elements / 2, chunk_elements]);
    let leaves = random.pick(&[0, 0, 15]);
    let on_host = random.pick(&[0, 0, 0, 15]);
    let mut units: Vec<Unit> = Vec::new();
    for _ in 0..count {
        let parameters = if whole {
            vec![chunk_elements]
        } else {
            let parameters = random.range(1..=3);
            (0..parameters).map(|_| random.range(1..=largest / parameters)).collect()
        };
        let leaf = random.percent(leaves);
        let host = random.percent(on_host);
        units.push(Unit { parameters, leaf, host });
    }
    units[0].leaf |= random.percent(40);
    if units.iter().all(|unit| unit.host) {
        units[0].host = false;
    }
    units
}

fn layers(random: &mut Random, units: usize, half_bytes: u64) -> Vec<Layer> {
    let mut order: Vec<usize> = (0..units).collect();
    if random.percent(15) {
        random.shuffle(&mut order);
    }
    let longest = random.pick(&[1, 2, 4]);
    let recomputed = random.pick(&[0, 50, 100]);
    let most_bytes = random.pick(&[0, half_bytes / 2, 2 * half_bytes, 5 * half_bytes]);
    let unit_bytes = random.pick(&[1, 1, half_bytes]);
    let bytes = |random: &mut Random, most: u64| random.range(0..=most) / unit_bytes * unit_bytes;
    let alike = random.percent(50);
    let mut layers: Vec<Layer> = Vec::new();
    let mut rest = &order[..];
    while !rest.is_empty() {
        let length = random.range(1..=longest.min(rest.len() as u64)) as usize;
        let mut layer = match layers.first() {
            Some(first) if alike => first.clone(),
            _ => Layer {
                units: Vec::new(),
                recompute: random.percent(recomputed),
                kept_bytes: bytes(random, most_bytes),
                saved_bytes: bytes(random, most_bytes / 2),
                working_bytes: bytes(random, most_bytes),
            },
        };
        layer.units = rest[..length].to_vec();
        layers.push(layer);
        rest = &rest[length..];
    }
    layers
}

fn options(random: &mut Random, program: &Program, chunk_elements: u64) -> Options {
    let ranks = if random.percent(40) { 1 } else { random.range(2..=8) };
    let local_ranks = if random.percent(50) { ranks } else { random.range(1..=ranks) };
    let chunks = pack(program, chunk_elements).expect("units are no larger than chunks");
    let chunks = chunks.len() as u64;
    let half = 2 * chunk_elements;
    let overall_gpu = random.pick(&[1000, 1000, 800, 500]);
    let margin_use = random.pick(&[1000, 1000, 800, 300]);
    // From far too little for anything to room for all; often so that some of ADAM comes to the GPU.
    let gpu_bytes = match random.range(0..=5) {
        0 => half * random.range(1..=4),
        1 => half * random.range(2..=2 * chunks + 4) * 7 / 6,
        2 => half * random.range(4..=8 * chunks + 30),
        _ => {
            let ours = half * (chunks.div_ceil(ranks) + ranks - 1) + program.other_bytes();
            let adam = 6 * half * random.range(0..=4) * 1000 / margin_use as u64;
            let more = if random.percent(30) { 0 } else { random.range(0..=6 * half) };
            (ours + adam + more) * 1000 / overall_gpu as u64
        }
    };
    let local_chunks = chunks.div_ceil(ranks);
    let host_bytes = if random.percent(75) {
        1 << 40
    } else {
        local_ranks * half * random.range(3 * local_chunks..=9 * local_chunks + 4)
    };
    let quirks = match random.range(0..=3) {
        0 | 1 => Quirks::ALL,
        2 => Quirks::default(),
        _ => quirks(random),
    };
    Options {
        chunk_elements,
        gpu_bytes,
        host_bytes,
        ranks,
        local_ranks,
        rank: random.range(0..=ranks - 1),
        overall_gpu,
        overall_cpu: random.pick(&[1000, 1000, 800]),
        warmup: random.pick(&[100, 200, 500, 500, 1000]),
        margin_use,
        hybrid: random.percent(70),
        saving: random.percent(50),
        cache: random.percent(30),
        monitor: random.percent(70),
        fixed_split: random.percent(15),
        shared_gpu: random.percent(10),
        quirks,
    }
}

fn quirks(random: &mut Random) -> Quirks {
    let mut quirks = Quirks::default();
    quirks.all_mut().into_iter().for_each(|quirk| *quirk = random.percent(50));
    quirks
}
