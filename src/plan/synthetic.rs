//! Problems in the shape of one rank's memory in the training of a large language model.
//!
//! They are made up, but their structure is that of real runs: a step has micro-batches of which
//! a few are in flight at once (one forward, one backward, as pipelines do), a forward pass saves
//! blocks layer by layer, the backward pass frees them in reverse, gradients live from a step's
//! first backward pass to its optimizer. One tick is one allocation or one free.
//!
//! ```text
//!   bytes
//!     ^           ┌─────────── gradients ────────┬─┐
//!     │    ┌──┐┌──┴┐ ┌─┐┌──┐ ┌─┐┌──┐             │o│  o optimizer's temporaries
//!     │  ┌─┘f0└┘f1 └─┘b└┘f2└─┘b└┘f3└── ... ──┐   │ │  f forward, b backward
//!     │  │   activations of those in flight  │   │ │
//!     ├──┴───────────────────────────────────┴───┴─┴──> next step
//!     │ weights and optimizer state: live throughout
//!     └──────────────────────────────────────────────> ticks
//! ```

use std::str::FromStr;

use super::problem::{Buffer, Problem};
use crate::units::random::Random;
use crate::units::whole_number;

/// All sizes are multiples of this many bytes, as those of PyTorch's allocator.
const ROUND_BYTES: u64 = 512;
/// Tokens of a sequence.
const SEQUENCE: u64 = 4096;
/// Words that the model knows.
const VOCABULARY: u64 = 32_000;
/// Ranks that share every layer.
const TENSOR_PARALLEL: u64 = 8;
/// Experts of a mixture, and how many of them see a token.
const EXPERTS: usize = 8;
const EXPERTS_PER_TOKEN: u64 = 2;
/// Saved blocks from this size on have a gradient of their size for a moment.
const LARGE_BYTES: u64 = 1 << 20;
/// How often an operation of the backward pass takes a workspace.
const WORKSPACE_SHARE: f64 = 0.3;
/// Most buffers that may be asked for: they take 4 GB.
const BLOCKS_MAX: u64 = 30_000_000;

/// What kind of model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All sizes the same in every micro-batch.
    Dense,
    /// Sequences of random length, tokens spread over experts at random: many sizes.
    Moe,
    /// Dense without weights, gradients and optimizer: nothing but activations.
    Thin,
}

/// What to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Kind of model.
    pub kind: Kind,
    /// Buffers: at least so many; the last micro-batches are finished.
    pub blocks: u64,
    /// Layers.
    pub layers: u64,
    /// Micro-batches between their forward and backward pass at once.
    pub in_flight: u64,
    /// Micro-batches of a step.
    pub micro_batches: u64,
    /// Width of the model.
    pub hidden: u64,
    /// For everything random.
    pub seed: u64,
}

/// A text that names no shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadShape {
    /// Neither dense, moe nor thin.
    #[error("unknown kind {0:?}; expected dense, moe or thin")]
    Kind(String),
    /// A key that no shape has.
    #[error("unknown key {0:?}; expected seed, layers, in_flight, micro_batches or hidden")]
    Key(String),
    /// No number, or one out of range.
    #[error("{key}: {text:?} is no whole number from {min} to {max} (1e5 is one)")]
    Number {
        /// Of what.
        key: &'static str,
        /// What was written.
        text: String,
        /// Least that is allowed.
        min: u64,
        /// Most that is allowed.
        max: u64,
    },
    /// A part that is no `KEY=VALUE`.
    #[error("{0:?} is no KEY=VALUE; expected KIND:BLOCKS[,KEY=VALUE]..., as in dense:1e5,seed=3")]
    Form(String),
}

impl Shape {
    /// The usual model for so many blocks of a kind.
    pub fn preset(kind: Kind, blocks: u64) -> Shape {
        let (layers, in_flight, micro_batches, hidden) = match (kind, blocks) {
            (Kind::Thin, _) => (8, 2, 8, 2048),
            (_, ..=30_000) => (8, 3, 6, 4096),
            (_, ..=300_000) => (32, 4, 16, 4096),
            (_, ..=3_000_000) => (48, 4, 32, 4096),
            _ => (96, 4, 64, 8192),
        };
        Shape { kind, blocks, layers, in_flight, micro_batches, hidden, seed: 7 }
    }
}

impl std::fmt::Display for Shape {
    /// As [`Shape::from_str`] reads it; keys with their usual values are left out.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            Kind::Dense => "dense",
            Kind::Moe => "moe",
            Kind::Thin => "thin",
        };
        write!(f, "{kind}:{}", self.blocks)?;
        let usual = Shape::preset(self.kind, self.blocks);
        let keys = [
            ("seed", self.seed, usual.seed),
            ("layers", self.layers, usual.layers),
            ("in_flight", self.in_flight, usual.in_flight),
            ("micro_batches", self.micro_batches, usual.micro_batches),
            ("hidden", self.hidden, usual.hidden),
        ];
        for (key, value, usual) in keys {
            if value != usual {
                write!(f, ",{key}={value}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for Shape {
    type Err = BadShape;

    /// `KIND:BLOCKS[,KEY=VALUE]...`: `dense:1e5`, `moe:250000,seed=3,layers=24`.
    fn from_str(text: &str) -> Result<Shape, BadShape> {
        let mut parts = text.split(',');
        let head = parts.next().unwrap_or_default();
        let (kind, blocks) =
            head.split_once(':').ok_or_else(|| BadShape::Form(head.trim().to_owned()))?;
        let kind = match kind.trim() {
            "dense" => Kind::Dense,
            "moe" => Kind::Moe,
            "thin" => Kind::Thin,
            other => return Err(BadShape::Kind(other.to_owned())),
        };
        let mut shape = Shape::preset(kind, number("blocks", blocks, 1, BLOCKS_MAX)?);
        for part in parts {
            let (key, value) =
                part.split_once('=').ok_or_else(|| BadShape::Form(part.trim().to_owned()))?;
            match key.trim() {
                "seed" => shape.seed = number("seed", value, 0, u64::MAX)?,
                "layers" => shape.layers = number("layers", value, 1, 1000)?,
                "in_flight" => shape.in_flight = number("in_flight", value, 1, 1000)?,
                "micro_batches" => {
                    shape.micro_batches = number("micro_batches", value, 1, 10_000)?;
                }
                "hidden" => shape.hidden = number("hidden", value, 8, 1 << 17)?,
                other => return Err(BadShape::Key(other.to_owned())),
            }
        }
        Ok(shape)
    }
}

/// A whole number in range, plain or as `1e5`.
fn number(key: &'static str, text: &str, min: u64, max: u64) -> Result<u64, BadShape> {
    let text = text.trim();
    let value = whole_number(text);
    let bad = || BadShape::Number { key, text: text.to_owned(), min, max };
    value.filter(|value| (min..=max).contains(value)).ok_or_else(bad)
}

/// Makes the problem of a shape: the same for the same shape, everywhere.
pub fn problem(shape: &Shape) -> Problem {
    let mut run = Run::new(shape);
    let weights = if shape.kind == Kind::Thin { Vec::new() } else { run.weights() };
    while (run.buffers.len() as u64) < shape.blocks {
        run.step(&weights);
    }
    run.finish()
}

/// Blocks that a forward pass saved for the backward pass, in order.
type Saved = Vec<u32>;

/// A run of the model, with the buffers so far.
struct Run<'a> {
    shape: &'a Shape,
    random: Random,
    /// The next tick.
    tick: u64,
    buffers: Vec<Buffer>,
    /// How many of the first buffers live to the end.
    persistent: usize,
}

/// What one layer takes in a forward pass, in bytes.
struct Layer {
    saved: Vec<u64>,
    temporary: [u64; 5],
}

impl<'a> Run<'a> {
    fn new(shape: &'a Shape) -> Run<'a> {
        let buffers = Vec::with_capacity(shape.blocks as usize);
        Run { shape, random: Random::new(shape.seed), tick: 0, buffers, persistent: 0 }
    }

    /// Allocates: the buffer's number. It ends when it is freed.
    fn alloc(&mut self, bytes: u64) -> u32 {
        let size = bytes.max(1).div_ceil(ROUND_BYTES) * ROUND_BYTES;
        let index = self.buffers.len() as u32;
        self.buffers.push(Buffer::new(self.tick, u64::MAX, size));
        self.tick += 1;
        index
    }

    fn free(&mut self, index: u32) {
        self.buffers[index as usize].end = self.tick;
        self.tick += 1;
    }

    /// Allocates and frees with nothing between.
    fn touch(&mut self, bytes: u64) {
        let index = self.alloc(bytes);
        self.free(index);
    }

    /// Places weights and optimizer state, live from the first tick to the last; gives the
    /// weights' bytes of a layer.
    fn weights(&mut self) -> Vec<u64> {
        let (hidden, share) = (self.shape.hidden, TENSOR_PARALLEL);
        let inner = inner(hidden);
        let weights = vec![
            hidden * 3 * hidden / share * 2,
            hidden * hidden / share * 2,
            inner * hidden / share * 2,
            inner * hidden / share * 2,
            hidden * inner / share * 2,
            hidden * 2,
            hidden * 2,
        ];
        for _ in 0..self.shape.layers {
            for &bytes in &weights {
                // The weight in 16 bits, its two moments in 32.
                for bytes in [bytes, 2 * bytes, 2 * bytes] {
                    self.alloc(bytes);
                }
            }
        }
        self.persistent = self.buffers.len();
        self.tick = 1;
        self.buffers.iter_mut().for_each(|buffer| buffer.start = 0);
        weights
    }

    /// One step: its micro-batches, one forward and one backward in turn, and the optimizer.
    /// Begins no further micro-batch once there are enough blocks.
    fn step(&mut self, weights: &[u64]) {
        let mut gradients: Option<Vec<(u64, u32)>> = None;
        let mut in_flight = std::collections::VecDeque::new();
        let mut begun = 0;
        loop {
            let enough = self.buffers.len() as u64 >= self.shape.blocks;
            let begin = begun < self.shape.micro_batches && !(enough && begun > 0);
            if begin {
                begun += 1;
                let tokens = self.tokens();
                let saved = self.forward(tokens);
                in_flight.push_back((tokens, saved));
                if (in_flight.len() as u64) < self.shape.in_flight {
                    continue;
                }
            }
            let Some((tokens, saved)) = in_flight.pop_front() else { break };
            let logits = self.alloc(tokens * VOCABULARY / TENSOR_PARALLEL * 2);
            let loss = self.alloc(tokens * VOCABULARY / TENSOR_PARALLEL * 4);
            self.free(logits);
            if gradients.is_none() {
                gradients = Some(self.gradients(weights));
            }
            self.backward(saved);
            self.free(loss);
        }
        self.optimizer(gradients.unwrap_or_default());
    }

    /// Tokens of the next micro-batch.
    fn tokens(&mut self) -> u64 {
        match self.shape.kind {
            Kind::Moe => SEQUENCE / 4 + self.random.below(SEQUENCE * 3 / 4),
            Kind::Dense | Kind::Thin => SEQUENCE,
        }
    }

    /// Gradients of every weight, last layer first, with their bytes.
    fn gradients(&mut self, weights: &[u64]) -> Vec<(u64, u32)> {
        let layers = self.shape.layers as usize;
        let bytes = (0..layers).flat_map(|_| weights.iter().rev());
        bytes.map(|&bytes| (2 * bytes, self.alloc(2 * bytes))).collect()
    }

    /// All layers: saves blocks, with short-lived ones between.
    fn forward(&mut self, tokens: u64) -> Saved {
        let mut saved = Saved::new();
        for _ in 0..self.shape.layers {
            let layer = self.layer(tokens);
            let every = layer.saved.len().div_ceil(layer.temporary.len());
            for (at, &bytes) in layer.saved.iter().enumerate() {
                // Made while the block it is turned into does not exist yet.
                let temporary = (at % every == 0).then(|| layer.temporary[at / every]);
                let temporary = temporary.map(|bytes| self.alloc(bytes));
                saved.push(self.alloc(bytes));
                if let Some(temporary) = temporary {
                    self.free(temporary);
                }
            }
        }
        saved
    }

    /// What a layer takes for so many tokens.
    fn layer(&mut self, tokens: u64) -> Layer {
        let (hidden, share) = (self.shape.hidden, TENSOR_PARALLEL);
        let inner = inner(hidden);
        let full = tokens * hidden * 2;
        let mut saved = vec![
            full,                                      // residual stream
            full,                                      // first norm
            tokens * 4,                                // its scale
            tokens * 3 * hidden / share * 2,           // queries, keys, values
            tokens * hidden / share * 2,               // attention
            tokens * hidden.div_ceil(128 * share) * 4, // its row sums
            tokens * hidden,                           // dropout mask
            full,                                      // residual stream
            full,                                      // second norm
            tokens * 4,                                // its scale
        ];
        if self.shape.kind == Kind::Moe {
            saved.push(tokens * EXPERTS as u64 * 4);
            for expert_tokens in self.routed(tokens * EXPERTS_PER_TOKEN) {
                saved.push(expert_tokens * inner / share * 4);
                saved.push(expert_tokens * inner / share * 2);
            }
        } else {
            saved.extend([tokens * inner / share * 2; 3]); // gate, up, and their product
        }
        let wide = tokens * inner / share * 2;
        let temporary = [full, tokens * 3 * hidden / share * 4, full * 2, wide * 2, full];
        Layer { saved, temporary }
    }

    /// How many tokens each expert gets: cut at random, which spreads them like independent
    /// exponential draws brought to a sum.
    fn routed(&mut self, tokens: u64) -> [u64; EXPERTS] {
        let mut cuts = [tokens; EXPERTS];
        cuts[1..].iter_mut().for_each(|cut| *cut = self.random.below(tokens + 1));
        cuts.sort_unstable();
        let mut before = 0;
        cuts.map(|cut| cut - std::mem::replace(&mut before, cut))
    }

    /// Frees what was saved, last first, with gradients and workspaces between.
    fn backward(&mut self, saved: Saved) {
        let mut gradient: Option<u32> = None;
        for &block in saved.iter().rev() {
            let bytes = self.buffers[block as usize].size_bytes;
            if bytes >= LARGE_BYTES {
                // The gradient of the operation before is freed when this one is there.
                let next = self.alloc(bytes);
                if let Some(before) = gradient.replace(next) {
                    self.free(before);
                }
            }
            if self.random.unit() < WORKSPACE_SHARE {
                let workspace = LARGE_BYTES << self.random.below(5);
                self.touch(workspace);
            }
            self.free(block);
        }
        if let Some(last) = gradient {
            self.free(last);
        }
    }

    /// Two temporaries for every gradient, which then goes.
    fn optimizer(&mut self, gradients: Vec<(u64, u32)>) {
        for (bytes, gradient) in gradients {
            let update = self.alloc(bytes);
            let root = self.alloc(bytes);
            self.free(root);
            self.free(update);
            self.free(gradient);
        }
    }

    fn finish(mut self) -> Problem {
        let persistent = &mut self.buffers[..self.persistent];
        persistent.iter_mut().for_each(|buffer| buffer.end = self.tick);
        Problem { buffers: self.buffers, ..Problem::default() }
    }
}

/// Width of the feed-forward layer: 8/3 of the model's, in multiples of 256.
fn inner(hidden: u64) -> u64 {
    (hidden * 8 / 3).div_ceil(256) * 256
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Kind; 3] = [Kind::Dense, Kind::Moe, Kind::Thin];

    #[test]
    fn problems_have_as_many_buffers_as_asked_for_and_few_more() {
        for kind in KINDS {
            for blocks in [1, 5000, 10_000, 100_000] {
                let shape = Shape::preset(kind, blocks);
                let buffers = problem(&shape).buffers.len() as u64;
                // At most the micro-batches in flight and an optimizer's step on top: a forward
                // pass saves less than 40 blocks a layer, and as many short ones come at most.
                let more = shape.layers * (80 * (shape.in_flight + 1) + 21 + 3 * 7);
                assert!((blocks..blocks + more).contains(&buffers), "{kind:?} {blocks}: {buffers}");
            }
        }
    }

    #[test]
    fn lives_are_not_empty_and_every_tick_has_one_event() {
        for kind in KINDS {
            let problem = problem(&Shape::preset(kind, 10_000));
            let end = problem.buffers.iter().map(|buffer| buffer.end).max().unwrap_or(0);
            let mut events = Vec::new();
            for buffer in &problem.buffers {
                assert!(buffer.start < buffer.end && buffer.size_bytes > 0);
                assert_eq!(buffer.size_bytes % ROUND_BYTES, 0);
                if (buffer.start, buffer.end) != (0, end) {
                    events.extend([buffer.start, buffer.end]);
                }
            }
            let weights = problem.buffers.iter().filter(|buffer| buffer.end == end).count();
            assert_eq!(weights, if kind == Kind::Thin { 1 } else { 8 * 7 * 3 });
            events.sort_unstable();
            assert!(events.windows(2).all(|pair| pair[0] < pair[1]), "{kind:?}");
        }
    }

    #[test]
    fn the_seed_alone_tells_problems_of_a_shape_apart() {
        for kind in KINDS {
            let shape = Shape::preset(kind, 3000);
            let other = Shape { seed: 8, ..shape.clone() };
            assert_eq!(problem(&shape), problem(&shape));
            assert_ne!(problem(&shape), problem(&other), "{kind:?}");
        }
    }

    #[test]
    fn shapes_are_read_and_written() {
        for text in ["dense:10000", "moe:2500,seed=3,layers=24", "thin:7,hidden=64"] {
            let shape: Shape = text.parse().expect("a shape");
            assert_eq!(shape.to_string(), text);
        }
        assert_eq!("dense:1e5".parse(), Ok(Shape::preset(Kind::Dense, 100_000)));
        assert_eq!(
            " moe : 2E3 , in_flight = 2 ".parse::<Shape>().map(|shape| shape.in_flight),
            Ok(2)
        );
    }

    #[test]
    fn wrong_shapes_say_what_was_expected() {
        let error = |text: &str| text.parse::<Shape>().expect_err("wrong").to_string();
        assert_eq!(error("sparse:10"), r#"unknown kind "sparse"; expected dense, moe or thin"#);
        assert!(error("dense").contains("no KEY=VALUE; expected KIND:BLOCKS"));
        assert!(error("dense:1.5").contains("from 1 to 30000000"));
        assert!(error("dense:1e30").contains("blocks"));
        assert!(error("dense:10,colour=red").contains(r#"unknown key "colour""#));
        assert!(error("dense:10,layers=0").contains("layers"));
        assert!(error("dense:10,seed").contains("no KEY=VALUE"));
    }

    /// Cuts of a sum: all there, and about an eighth each on average.
    #[test]
    fn every_token_is_routed() {
        let shape = Shape::preset(Kind::Moe, 1);
        let mut run = Run::new(&shape);
        let mut first = 0;
        for _ in 0..1000 {
            let routed = run.routed(8000);
            assert_eq!(routed.iter().sum::<u64>(), 8000);
            first += routed[0];
        }
        assert!((900_000..1_100_000).contains(&first), "{first}");
    }
}
