//! Streams that come up while a program runs: an allocator that learns of them as they come does
//! what one does that knew them all from the beginning.

use std::collections::VecDeque;

use fraglab::alloc::registry::{self, Visitor};
use fraglab::alloc::spec::AllocSpec;
use fraglab::alloc::{Action, Allocator, BuildInputs, Env, Handle, Request};
use fraglab::device::Sim;
use fraglab::device::sim::addresses::Addresses;
use fraglab::trace::{Pool, PoolKind};
use fraglab::units::{BlockId, PoolId, StreamId};

use crate::common::{Rng, WITHOUT_PROFILE};

/// Handles of the streams, which order them: not as they come.
const HANDLES: [u64; 5] = [0, 900, 300, 512, 7];

/// Operations of one program.
const OPERATIONS: usize = 1500;

struct World {
    device: Sim,
    waiting: VecDeque<Handle>,
    log: Vec<Action>,
}

impl Env for World {
    type Device = Sim;
    const LOG: bool = true;

    fn device(&mut self) -> &mut Sim {
        &mut self.device
    }

    fn next_completed(&mut self) -> Option<Handle> {
        self.waiting.pop_front()
    }

    fn wait_completed(&mut self) -> Option<Handle> {
        self.waiting.pop_front()
    }

    fn wait_completed_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        let at = self.waiting.iter().position(|&handle| wanted(handle))?;
        self.waiting.remove(at)
    }

    fn log(&mut self, action: Action) {
        self.log.push(action);
    }
}

/// Random requests on streams that come up one by one, in and outside private pools.
struct Program {
    seed: u64,
    /// The allocator is told of streams as they come.
    told: bool,
}

impl Visitor for Program {
    type Output = Vec<Action>;

    fn visit<A: Allocator + Send + 'static>(self, mut allocator: A) -> Vec<Action> {
        let device = Sim::new(Some(400 << 20), None, Addresses::ascending());
        let mut env = World { device, waiting: VecDeque::new(), log: Vec::new() };
        let mut rng = Rng(self.seed);
        let mut live: Vec<Handle> = Vec::new();
        let (mut known, mut entered) = (1, None);
        for operation in 0..OPERATIONS {
            match rng.below(40) {
                0 => allocator.empty_cache(&mut env),
                1 if entered.is_none() => {
                    let pool = PoolId(rng.below(2) as u32);
                    allocator.pool_enter(&mut env, pool);
                    entered = Some(pool);
                }
                2 => {
                    if let Some(pool) = entered.take() {
                        allocator.pool_leave(&mut env, pool);
                    }
                }
                3..20 if !live.is_empty() => {
                    let handle = live.swap_remove(rng.below(live.len()));
                    if rng.below(5) == 0 {
                        allocator.defer(&mut env, handle);
                        env.waiting.push_back(handle);
                    } else {
                        allocator.free(&mut env, handle);
                    }
                }
                _ => {
                    let used = (1 + operation * HANDLES.len() / OPERATIONS).min(HANDLES.len());
                    let stream = StreamId(rng.below(used) as u32);
                    while self.told && known <= stream.index() {
                        allocator.stream_added(StreamId(known as u32), HANDLES[known]);
                        known += 1;
                    }
                    let large = rng.below(3) == 0;
                    let size_bytes = 1 + rng.below(if large { 30 << 20 } else { 1 << 20 }) as u64;
                    let block = BlockId(operation as u32);
                    let request = Request { block, size_bytes, stream };
                    live.extend(allocator.malloc(&mut env, request));
                }
            }
            if operation % 8 == 0 {
                let held = allocator.check_invariants();
                held.unwrap_or_else(|broken| panic!("{operation}: {broken}"));
            }
        }
        env.log
    }
}

#[test]
fn streams_that_come_up_are_as_good_as_those_that_were_known() {
    let pool = |name: &str| Pool {
        name: name.to_owned(),
        kind: PoolKind::MemPool,
        no_split: false,
        use_on_oom: name == "q",
    };
    for allocator in WITHOUT_PROFILE {
        let spec: AllocSpec = allocator.parse().expect("a specification");
        for seed in 0..3 {
            let [told, knew] = [true, false].map(|told| {
                let count = if told { 1 } else { HANDLES.len() };
                let inputs = BuildInputs {
                    stream_handles: HANDLES[..count].to_vec(),
                    pools: vec![pool("p"), pool("q")],
                    ..BuildInputs::default()
                };
                registry::build(&spec, &inputs, Program { seed, told }).expect("built")
            });
            let first = told.iter().zip(&knew).position(|(told, knew)| told != knew);
            assert_eq!((first, told.len()), (None, knew.len()), "{allocator} {seed}");
            assert!(told.len() > OPERATIONS, "{allocator}: {}", told.len());
        }
    }
}
