//! What the model must give by `specs/patrickstar.md`, section 8: figures that the real control code
//! gave, worked without a GPU.

use super::model::{Entry, Model, Options, Place, Quirks, What};
use super::program::{Layer, Program, Stage, Unit};

/// Bytes of an fp16 chunk of 100 elements, the F of the spec's tables.
const F: u64 = 200;

fn options(gpu_bytes: u64) -> Options {
    Options {
        chunk_elements: 100,
        gpu_bytes,
        host_bytes: 100_000 * F,
        ranks: 1,
        local_ranks: 1,
        rank: 0,
        overall_gpu: 1000,
        overall_cpu: 1000,
        warmup: 500,
        margin_use: 800,
        hybrid: true,
        saving: false,
        cache: false,
        monitor: true,
        fixed_split: false,
        shared_gpu: false,
        quirks: Quirks::ALL,
    }
}

/// A unit a layer, without activations.
fn plain(units: &[Unit], steps: u32) -> Program {
    let layers = (0..units.len()).map(|unit| Layer { units: vec![unit], ..Layer::default() });
    Program { units: units.to_vec(), layers: layers.collect(), steps, ..Program::default() }
}

fn ran(program: &Program, options: &Options) -> Model {
    let mut model = Model::new(program, options).expect("units fit chunks");
    model.run();
    assert!(!model.stopped);
    model
}

fn of(model: &Model, step: u32, stage: Stage) -> impl Iterator<Item = &Entry> {
    model.log.iter().filter(move |entry| (entry.step, entry.stage) == (step, stage))
}

/// Moves as the spec writes them: `+2 -0`.
fn moves(model: &Model, step: u32, stage: Stage) -> String {
    let signs = of(model, step, stage).filter_map(|entry| match entry.what {
        What::ToGpu => Some(format!("+{}", entry.chunk)),
        What::ToHost => Some(format!("-{}", entry.chunk)),
        _ => None,
    });
    signs.collect::<Vec<_>>().join(" ")
}

/// Moves up and down.
fn counts(model: &Model, step: u32, stage: Stage) -> (usize, usize) {
    (count(model, step, stage, What::ToGpu), count(model, step, stage, What::ToHost))
}

fn count(model: &Model, step: u32, stage: Stage, what: What) -> usize {
    of(model, step, stage).filter(|entry| entry.what == what).count()
}

fn margin(model: &Model) -> f64 {
    let (above, below) = model.last_margin().expect("a backward pass");
    (above * 1000 / below) as f64 / 1000.0
}

/// In chunks.
fn peaks(model: &Model, step: usize) -> (f64, f64) {
    let peaks = model.step_peaks[step];
    (peaks.gpu as f64 / F as f64, peaks.gpu_chunks as f64 / F as f64)
}

#[test]
fn trace_a() {
    let mut units = vec![Unit::leaf(&[60])];
    units.extend((0..5).map(|_| Unit::of(&[50, 10])));
    units.push(Unit::of(&[30]));
    let model = ran(&plain(&units, 4), &options(5 * F));
    assert_eq!(moves(&model, 0, Stage::Forward), "+0 +2 -0 +4 -2 +6 -4 +8 -6 +10");
    assert_eq!(moves(&model, 0, Stage::Backward), "-8 +6 -6 +4 -4 +2 -2 +0");
    assert_eq!(moves(&model, 1, Stage::Forward), "+2 +4 -0 +6 -2 +8");
    for step in 2..4 {
        assert_eq!(moves(&model, step, Stage::Forward), "+6 -0 +8 -2 +10");
    }
    for step in 1..4 {
        assert_eq!(moves(&model, step, Stage::Backward), "-10 -8 +2 -6 +0");
    }
    let mut list = [120; 15];
    list[..7].fill(0);
    list[7] = 60;
    assert_eq!(model.gpu_list, list);
    assert_eq!(margin(&model), -0.213);
    assert_eq!(peaks(&model, 3).1, 4.0);
}

/// Derived by hand: two chunks fit in the warm-up; later four in forward, three once S is 1 F.
#[test]
fn trace_b() {
    let units = vec![Unit::of(&[100]); 6];
    let model = ran(&plain(&units, 4), &Options { hybrid: false, ..options(5 * F) });
    assert_eq!(model.length, Some(13));
    assert_eq!(moves(&model, 0, Stage::Forward), "+0 +2 -0 +4 -2 +6 -4 +8 -6 +10");
    assert_eq!(moves(&model, 0, Stage::Backward), "-8 +6 -6 +4 -4 +2 -2 +0");
    assert_eq!(moves(&model, 1, Stage::Forward), "+2 +4 -0 +6 -2 +8");
    assert_eq!(moves(&model, 1, Stage::Backward), "-10 -8 +2 -6 +0");
    for step in 2..4 {
        assert_eq!(moves(&model, step, Stage::Forward), "+6 -0 +8 -2 -4 +10");
        assert_eq!(moves(&model, step, Stage::Backward), "-10 +4 -8 +2 -6 +0");
    }
}

#[test]
fn trace_c() {
    let units = vec![Unit::of(&[100]); 6];
    let model = ran(&plain(&units, 4), &options(26 * F));
    assert_eq!(moves(&model, 0, Stage::Forward), "+0 +2 +4 +6 +8 +10");
    assert_eq!(moves(&model, 0, Stage::Adam), "+1 +3");
    assert_eq!(margin(&model), 2.533);
    for step in 1..4 {
        for stage in [Stage::Forward, Stage::Backward, Stage::Adam] {
            assert_eq!(moves(&model, step, stage), "");
        }
        let copies = |what| {
            let copies = of(&model, step, Stage::Adam).filter(move |entry| entry.what == what);
            copies.map(|entry| (entry.place, entry.bytes)).collect::<Vec<_>>()
        };
        assert_eq!(copies(What::GradientRead), [(Place::Host, F); 4]);
        let bytes: Vec<u64> = copies(What::WriteBack).iter().map(|copy| copy.1).collect();
        assert_eq!(bytes, [2 * F, 2 * F, 2 * F, F], "the last at 2 bytes an element");
    }
    assert_eq!(peaks(&model, 3), (21.0, 18.0));
}

#[test]
fn closed_form() {
    let units = vec![Unit::of(&[100]); 16];
    let options = Options { hybrid: false, ..options(10 * F) };
    let model = ran(&plain(&units, 4), &options);
    assert_eq!(model.length, Some(33));
    assert_eq!(counts(&model, 0, Stage::Forward), (16, 11));
    assert_eq!(counts(&model, 0, Stage::Backward), (11, 11));
    assert_eq!(counts(&model, 3, Stage::Forward), (8, 8));
    assert_eq!(counts(&model, 3, Stage::Backward), (8, 8));
    assert_eq!(count(&model, 3, Stage::Adam, What::GradientRead), 8);
    assert_eq!(count(&model, 3, Stage::Adam, What::WriteBack), 8);
}

/// What a line of the tables of 8.5 and 8.7 says: m, k, moves up and down in forward and backward,
/// peaks in chunks.
type Line = (f64, usize, (usize, usize), (usize, usize), (f64, f64));

fn line(model: &Model, step: u32) -> Line {
    (
        margin(model),
        model.gpu_groups(model.last_margin().expect("a backward pass")),
        counts(model, step, Stage::Forward),
        counts(model, step, Stage::Backward),
        peaks(model, step as usize),
    )
}

/// Spec 8.5: 16 layers of a chunk each. `kept` chunks of checkpoint a layer, or `saved` chunks and
/// no recompute.
fn tide(gpu: u64, kept: u64, saved: u64, change: impl Fn(&mut Options)) -> Model {
    let layers = (0..16).map(|unit| Layer {
        units: vec![unit],
        recompute: saved == 0,
        kept_bytes: kept * F,
        saved_bytes: saved * F,
        working_bytes: 4 * F,
    });
    let units = vec![Unit::of(&[100]); 16];
    let program = Program { units, layers: layers.collect(), steps: 5, ..Program::default() };
    let mut options = Options { overall_gpu: 800, warmup: 100, ..options(gpu * F) };
    change(&mut options);
    ran(&program, &options)
}

const NONE: (usize, usize) = (0, 0);

#[test]
fn tide_that_fits() {
    let model = tide(60, 1, 0, |_| {});
    assert_eq!(model.length, Some(49));
    assert_eq!(counts(&model, 0, Stage::Forward), (16, 12));
    assert_eq!(counts(&model, 0, Stage::Backward), (12, 12));
    assert_eq!(line(&model, 4), (1.466, 1, NONE, NONE, (43.0, 22.0)));
    let model = tide(60, 1, 0, |options| options.monitor = false);
    assert_eq!(line(&model, 4), (2.0, 1, NONE, NONE, (43.0, 22.0)));
    let model = tide(60, 1, 0, |options| {
        options.monitor = false;
        options.quirks.strict_margin = false;
    });
    assert_eq!(line(&model, 4).1, 2);
    let model = tide(40, 0, 0, |_| {});
    assert_eq!(line(&model, 4), (1.466, 1, NONE, NONE, (27.0, 22.0)));
}

#[test]
fn tide_that_does_not() {
    let model = tide(40, 1, 0, |_| {});
    assert_eq!(counts(&model, 0, Stage::Forward), (16, 13));
    assert_eq!(counts(&model, 0, Stage::Backward), (13, 13));
    assert_eq!(line(&model, 4), (-0.666, 0, (0, 4), (5, 1), (32.0, 16.0)));
    assert_eq!(count(&model, 4, Stage::Backward, What::OverBudget), 0);
    let model = tide(60, 0, 3, |_| {});
    assert_eq!(model.length, Some(33));
    assert_eq!(line(&model, 4), (-2.8, 0, (2, 15), (15, 2), (54.0, 14.0)));
    assert!(count(&model, 4, Stage::Backward, What::OverBudget) > 0);
}

#[test]
fn fixed_split() {
    let model = tide(40, 1, 0, |options| options.fixed_split = true);
    assert_eq!(line(&model, 4), (-0.666, 0, (13, 13), (13, 13), (24.0, 3.0)));
    let model = tide(40, 1, 0, |options| {
        options.fixed_split = true;
        options.warmup = 300;
    });
    assert_eq!(line(&model, 4), (-0.666, 0, (7, 7), (7, 7), (30.0, 9.0)));
}

/// Spec 5.12: with a static partition the optimizer's chunks leave in forward and come back in ADAM.
#[test]
fn fixed_split_fights_hybrid_adam() {
    let model = tide(60, 1, 0, |options| options.fixed_split = true);
    let optimizer = |entry: &&Entry| entry.bytes == 2 * F;
    for step in 1..5 {
        let down = of(&model, step, Stage::Forward).filter(optimizer);
        assert_eq!(down.filter(|entry| entry.what == What::ToHost).count(), 3);
        assert_eq!(counts(&model, step, Stage::Adam), (3, 0));
    }
}

/// Spec 7.2: 16 + 11 moves to the GPU in the warm-up are 27 F of host memory that nobody uses.
#[test]
fn phantom_bytes() {
    let units = vec![Unit::of(&[100]); 16];
    let base = Options { hybrid: false, ..options(10 * F) };
    let host_list = |options: &Options| ran(&plain(&units, 2), options).host_most();
    assert_eq!(host_list(&base), i128::from(27 * F));
    assert_eq!(host_list(&Options { cache: true, ..base.clone() }), 0);
    let quirks = Quirks { phantom: false, ..Quirks::ALL };
    assert_eq!(host_list(&Options { quirks, ..base }), 0);
}

/// Spec 5.12: idle buffers count as used. (The peak of 36 F that the spec has there is not met: 32.)
#[test]
fn cache_evicts_more() {
    let forward = |cache| {
        let model = tide(40, 1, 0, |options| options.cache = cache);
        counts(&model, 1, Stage::Forward).1
    };
    assert_eq!((forward(false), forward(true)), (4, 6));
}

/// Spec 8.7: 32 layers of a chunk each on four ranks.
fn ranks(gpu: u64, saving: bool) -> Model {
    let layers = (0..32).map(|unit| Layer {
        units: vec![unit],
        recompute: true,
        kept_bytes: F / 2,
        working_bytes: 2 * F,
        ..Layer::default()
    });
    let units = vec![Unit::of(&[100]); 32];
    let program = Program { units, layers: layers.collect(), steps: 4, ..Program::default() };
    let options = Options {
        overall_gpu: 800,
        warmup: 100,
        ranks: 4,
        local_ranks: 4,
        saving,
        ..options(gpu * F)
    };
    let model = ran(&program, &options);
    assert_eq!(model.length, Some(97));
    model
}

/// Collectives of each kind in forward and backward of a step.
fn calls(model: &Model, step: u32) -> [(usize, usize); 4] {
    [What::AllGather, What::ReduceScatter, What::Broadcast, What::Reduce].map(|what| {
        (count(model, step, Stage::Forward, what), count(model, step, Stage::Backward, what))
    })
}

const COLLECTIVE: [(usize, usize); 4] = [(8, 8), (0, 8), NONE, NONE];
const SAVING: [(usize, usize); 4] = [NONE, NONE, (32, 64), (0, 32)];

#[test]
fn ranks_that_fit() {
    let model = ranks(120, false);
    let (m, k, forward, backward, (_, chunks)) = line(&model, 3);
    assert_eq!((m, k, forward, backward, chunks), (8.8, 8, NONE, NONE, 59.0));
    assert_eq!(calls(&model, 3), COLLECTIVE);
    let model = ranks(120, true);
    let (m, k, forward, backward, (_, chunks)) = line(&model, 3);
    assert_eq!((m, k, forward, backward, chunks), (9.066, 8, NONE, NONE, 57.0));
    assert_eq!(calls(&model, 3), SAVING);
}

#[test]
fn ranks_that_do_not() {
    let model = ranks(60, false);
    let (m, k, forward, backward, (_, chunks)) = line(&model, 3);
    assert_eq!((m, k, forward, backward, chunks), (2.4, 2, NONE, (0, 5), 23.0));
    assert!(of(&model, 3, Stage::Backward).all(|e| e.what != What::ToHost || e.bytes == 2 * F));
    assert_eq!(counts(&model, 3, Stage::Adam), (5, 0));
    let model = ranks(40, false);
    let (m, k, forward, backward, (_, chunks)) = line(&model, 3);
    assert_eq!((m, k, forward, backward, chunks), (0.266, 0, (4, 0), (4, 8), 11.0));
    assert!(count(&model, 3, Stage::Backward, What::OverBudget) > 0);
    let model = ranks(40, true);
    let (m, k, forward, backward, (_, chunks)) = line(&model, 3);
    assert_eq!((m, k, forward, backward, chunks), (0.533, 0, NONE, NONE, 9.0));
}

/// Spec 4.4: a group or chunk inside one checkpointed layer is fetched three times.
#[test]
fn third_fetches() {
    let fetches = |units: usize, a_layer: usize, ranks: u64, saving: bool| {
        let layers = (0..units / a_layer).map(|layer| Layer {
            units: (layer * a_layer..(layer + 1) * a_layer).collect(),
            recompute: true,
            ..Layer::default()
        });
        let program = Program {
            units: vec![Unit::of(&[100]); units],
            layers: layers.collect(),
            steps: 2,
            ..Program::default()
        };
        let options = Options { ranks, local_ranks: ranks, saving, ..options(1000 * F) };
        let [gathers, _, broadcasts, _] = calls(&ran(&program, &options), 1);
        gathers.0 + gathers.1 + broadcasts.0 + broadcasts.1
    };
    for ranks in [2, 4, 8] {
        assert_eq!(fetches(32, 2, ranks, true), 96);
    }
    assert_eq!(fetches(32, 2, 2, false), 48);
    assert_eq!(fetches(32, 2, 4, false), 2 * 8);
    assert_eq!(fetches(32, 2, 8, false), 2 * 4);
    assert_eq!(fetches(64, 8, 4, false), 48);
    assert_eq!(fetches(64, 8, 4, true), 192);
}

/// Spec 2.3: margins and the groups that they give.
#[test]
fn groups_of_a_margin() {
    let model = Model::new(&plain(&vec![Unit::of(&[100]); 6], 1), &options(F)).expect("fits");
    for (hundredths, groups) in [(-50, 0), (100, 0), (101, 1), (200, 1), (500, 4), (530, 5)] {
        assert_eq!(model.gpu_groups((hundredths, 100)), groups);
    }
    assert_eq!(model.gpu_groups((5000, 100)), 6, "no more than there are chunks");
}

/// Spec 8.9: two chunks used at moments 0 and 1, T = 1.
#[test]
fn who_leaves_first() {
    let mut model =
        Model::new(&plain(&[Unit::of(&[60]), Unit::of(&[60])], 1), &options(9 * F)).expect("fits");
    let ids = model.two_used_at_moments_0_and_1();
    assert_eq!(model.leaves_first_at(0), ids[0]);
    assert_eq!(model.leaves_first_at(1), ids[1]);
}
