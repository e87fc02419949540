//! Jobs as STAlloc's recorder would log them: a pipeline stage of a dense model, 1F1B.
//!
//! Shapes as in the description of the tool (9.1): stage 0 of 2, tensor parallel 4, micro-batches of
//! 4 × 4096 tokens, hidden 4096, feed-forward 11008; activations are freed last in, first out,
//! gather and gradient buffers live shortly, optimizer states appear at the end of iteration 0.

use std::fmt::Write as _;

/// A log as it grows; every request has a fresh pointer.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) text: String,
    requests: u64,
}

/// A request of a [`Log`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pointer: u64,
    size_bytes: u64,
}

impl Log {
    pub(crate) fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    pub(crate) fn malloc(&mut self, size_bytes: u64) -> Block {
        self.requests += 1;
        let pointer = 0x7000_0000_0000 + self.requests * 512;
        writeln!(self.text, "1 {pointer:#x} {size_bytes} 0").expect("writes");
        Block { pointer, size_bytes }
    }

    pub(crate) fn free(&mut self, block: Block) {
        writeln!(self.text, "0 {:#x} {} 0", block.pointer, block.size_bytes).expect("writes");
    }

    /// A request that is freed at once.
    pub(crate) fn brief(&mut self, size_bytes: u64) {
        let block = self.malloc(size_bytes);
        self.free(block);
    }
}

/// How large a job is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense {
    pub(crate) layers: usize,
    pub(crate) micro_batches: usize,
    pub(crate) iterations: usize,
}

const TOKENS: u64 = 4 * 4096;
const HIDDEN: u64 = TOKENS * 4096 * 2;
const QKV: u64 = HIDDEN * 3 / 4;
const CONTEXT: u64 = HIDDEN / 4;
const LSE: u64 = 4 * 8 * 4096 * 4;
const STATS: u64 = TOKENS * 4;
const GATE_UP: u64 = TOKENS * 11008 / 4 * 2 * 2;
const ACT: u64 = GATE_UP / 2;
const MASK: u64 = TOKENS * 4096;
const WORKSPACE: u64 = 8 << 20;

impl Dense {
    /// The job's log.
    pub(crate) fn log(&self) -> String {
        let mut log = Log::default();
        let weights: Vec<u64> = vec![4096 * 4096 * 3 / 2, 4096 * 1024 * 2, 4096 * 5504 * 2, 8192];
        let weights = weights.repeat(self.layers * 2);
        let mut held: Vec<Block> = weights.iter().map(|&size| log.malloc(size)).collect();
        held.push(log.malloc(512));
        for iteration in 0..self.iterations {
            log.line(&format!("Iteration Index : {iteration}"));
            let mut waiting: std::collections::VecDeque<Vec<Block>> = Default::default();
            for batch in 0..self.micro_batches {
                log.line("micro-batch : F");
                let saved = self.forward(&mut log);
                waiting.push_back(saved);
                if batch > 0 {
                    self.one_back(&mut log, &mut waiting);
                }
            }
            self.one_back(&mut log, &mut waiting);
            log.brief(HIDDEN / 2 + 1024);
            if iteration == 0 {
                let states: Vec<Block> = weights.iter().map(|&size| log.malloc(size * 2)).collect();
                held.extend(states);
            }
        }
        log.line("Iteration Index : end");
        for block in held {
            log.free(block);
        }
        log.text
    }

    fn one_back(&self, log: &mut Log, waiting: &mut std::collections::VecDeque<Vec<Block>>) {
        log.line("micro-batch : B");
        let saved = waiting.pop_front().expect("a forward pass before every backward pass");
        self.backward(log, saved);
    }

    fn forward(&self, log: &mut Log) -> Vec<Block> {
        let mut saved = vec![log.malloc(TOKENS * 8), log.malloc(HIDDEN)];
        for _ in 0..self.layers {
            saved.push(log.malloc(STATS));
            saved.push(log.malloc(HIDDEN));
            log.brief(WORKSPACE);
            saved.push(log.malloc(QKV));
            saved.push(log.malloc(CONTEXT));
            saved.push(log.malloc(LSE));
            let projected = log.malloc(HIDDEN);
            saved.push(log.malloc(MASK));
            saved.push(log.malloc(HIDDEN));
            log.free(projected);
            saved.push(log.malloc(STATS));
            log.brief(300);
            saved.push(log.malloc(GATE_UP));
            saved.push(log.malloc(ACT));
            let down = log.malloc(HIDDEN);
            log.brief(WORKSPACE / 2);
            saved.push(log.malloc(HIDDEN));
            log.free(down);
        }
        saved.push(log.malloc(HIDDEN + 2048));
        saved
    }

    fn backward(&self, log: &mut Log, mut saved: Vec<Block>) {
        let mut pop = |log: &mut Log| {
            let block = saved.pop().expect("as many as the forward pass saved");
            log.free(block);
        };
        let mut gradient = log.malloc(HIDDEN);
        pop(log);
        for _ in 0..self.layers {
            let act = log.malloc(ACT);
            pop(log);
            log.brief(ACT + 4096);
            let gate_up = log.malloc(GATE_UP);
            pop(log);
            log.free(act);
            pop(log);
            let hidden = log.malloc(HIDDEN);
            log.brief(GATE_UP / 2 + 8192);
            log.free(gate_up);
            pop(log);
            log.free(gradient);
            pop(log);
            let context = log.malloc(CONTEXT);
            pop(log);
            log.brief(MASK / 2);
            let qkv = log.malloc(QKV);
            pop(log);
            pop(log);
            log.free(context);
            log.brief(QKV / 2 + 512);
            pop(log);
            gradient = log.malloc(HIDDEN);
            log.free(qkv);
            log.free(hidden);
            pop(log);
            pop(log);
        }
        log.free(gradient);
        pop(log);
        pop(log);
    }
}
