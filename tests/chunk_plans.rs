//! Packing into chunks and the search for their size: every figure of spec patrickstar 8.1 and 8.2,
//! and packing against a slow, literal model of the rule.

use fraglab::chunk::layout::{LayoutError, MI, PlacedTensor, pack, smallest_chunk_elements};
use fraglab::chunk::search::{
    Candidate, Machine, Room, Rule, best, fine_grid, nearest, search, shipped_grid, tightest,
};
use fraglab::trace::{ModelParameter, ModelUnit};
use fraglab::workload::shapes::{named, named_as};
use fraglab::workload::{Family, Job, activation_estimate, units};
use proptest::prelude::*;

use crate::common::jobs::job;

/// Units of a benchmark model as BERT type.
fn bert(name: &str) -> Vec<ModelUnit> {
    changed(name, |_| ())
}

fn changed(name: &str, change: impl FnOnce(&mut Job)) -> Vec<ModelUnit> {
    let mut job = job(named(name).expect("a named shape"));
    change(&mut job);
    units(&job)
}

fn gpt(name: &str) -> Vec<ModelUnit> {
    units(&job(named_as(name, Family::Gpt).expect("a benchmark model")))
}

fn tiled(name: &str) -> Vec<ModelUnit> {
    changed(name, |job| job.strategy.tiled_linear = true)
}

fn on_host(name: &str) -> Vec<ModelUnit> {
    changed(name, |job| job.strategy.cpu_embedding = true)
}

fn tiled_on_host(name: &str) -> Vec<ModelUnit> {
    changed(name, |job| {
        job.strategy.tiled_linear = true;
        job.strategy.cpu_embedding = true;
    })
}

/// `54/89.9` as the spec writes it; `x` if it cannot be built.
fn cell(units: &[ModelUnit], mi: u64) -> String {
    match pack(units, mi * MI) {
        Ok(layout) => format!("{}/{:.1}", layout.chunks.len(), 100.0 * layout.utilization()),
        Err(_) => "x".to_owned(),
    }
}

/// The one candidate of a chunk size.
fn candidate(units: &[ModelUnit], mi: u64, machine: &Machine) -> Candidate {
    search(units, [mi * MI], machine).remove(0).candidate.expect("it holds the model")
}

/// Spec patrickstar 8.1, the table.
#[test]
fn every_cell_of_the_packing_table() {
    let sizes = [120, 152, 184, 216, 248, 256, 280, 288, 312, 384];
    let table = "\
        GPT3_6B 54/89.9 41/93.5 33/96.0 30/89.9 27/87.0 24/94.8 22/94.6 22/92.0 20/93.4 16/94.8
        GPT3_8B 73/90.0 55/94.3 44/97.3 40/91.2 37/85.9 32/96.2 30/93.8 30/91.2 27/93.5 21/97.7
        GPT3_10B 102/79.6 76/84.3 61/86.8 51/88.4 51/77.0 51/74.6 38/91.6 38/89.0 34/91.8 28/90.6
        GPT3_12B 122/79.7 91/84.3 73/86.8 61/88.5 61/77.1 61/74.7 46/90.5 46/88.0 41/91.2 33/92.0
        GPT3_15B 158/79.7 118/84.3 95/86.5 79/88.6 79/77.2 79/74.8 59/91.5 59/89.0 53/91.4 43/91.6
        GPT3_18B 182/79.8 136/84.3 109/86.9 91/88.6 91/77.2 91/74.8 68/91.5 68/89.0 61/91.6 50/90.7
        GPT_DS_20B x x x x x x 77/90.5 77/88.0 77/81.2 76/66.9
        GPT_DS_40B x x x x x x 152/91.0 152/88.4 152/81.6 151/66.8
        GPT_DS_68B x x x x x x x x x 200/84.0";
    for line in table.lines() {
        let mut words = line.split_whitespace();
        let name = words.next().unwrap();
        let units = bert(name);
        let expected: Vec<&str> = words.collect();
        assert_eq!(expected.len(), sizes.len());
        for (mi, expected) in sizes.into_iter().zip(expected) {
            assert_eq!(cell(&units, mi), expected, "{name} {mi}");
            // The search counts what the layout lays out.
            let found = search(&units, [mi * MI], &Machine::default()).remove(0).candidate;
            let found = found.map_or("x".to_owned(), |found| {
                format!("{}/{:.1}", found.chunks, 100.0 * found.utilization)
            });
            assert_eq!(found, expected, "{name} {mi}");
        }
    }
}

/// Spec patrickstar 8.1, under the table, and 6.4 for the padded rows.
#[test]
fn other_layouts_of_the_spec() {
    assert_eq!(cell(&on_host("GPT3_8B"), 64), "145/83.9");
    assert_eq!(pack(&on_host("GPT3_8B"), 64 * MI).unwrap().dummies(4), 3);
    assert_eq!(cell(&on_host("GPT3_8B"), 128), "72/84.5");
    assert_eq!(cell(&tiled("GPT3_18B"), 248), "73/96.2");
    assert_eq!(cell(&tiled("GPT3_18B"), 312), "58/96.3");
    assert_eq!(cell(&tiled("GPT_DS_20B"), 248), "102/77.1");
    assert_eq!(cell(&tiled_on_host("GPT_DS_20B"), 88), "301/72.7");
    assert_eq!(cell(&gpt("GPT3_6B"), 184), "33/96.8");
    for name in ["GPT3_10B", "GPT3_12B", "GPT3_15B", "GPT3_18B"] {
        assert_eq!(cell(&gpt(name), 196), "x", "{name}");
        assert_ne!(cell(&gpt(name), 197), "x", "{name}");
    }
    // 1.5: powers of two are the worst choices.
    assert_eq!(cell(&bert("GPT_DS_20B"), 256), "x");
    assert_eq!(cell(&bert("GPT_DS_20B"), 385), "51/99.4");
}

/// Spec patrickstar 8.1: the best of every whole number of Mi up to 400. (It prints 99.3 for 8B;
/// 8,262,970,370 parameters in 20 · 397 Mi are 99.247%.)
#[test]
fn best_chunk_sizes_of_the_fine_grid() {
    for (name, mi, expected) in [
        ("GPT3_6B", 325, "18/99.6"),
        ("GPT3_8B", 397, "20/99.2"),
        ("GPT3_12B", 193, "61/99.1"),
        ("GPT3_15B", 193, "79/99.2"),
        ("GPT3_18B", 193, "91/99.2"),
        ("GPT_DS_20B", 385, "51/99.4"),
        ("GPT_DS_40B", 385, "101/99.6"),
        ("GPT_DS_68B", 325, "200/99.3"),
    ] {
        let units = bert(name);
        let rows = search(&units, fine_grid(&units), &Machine::default());
        let found = tightest(&rows).unwrap();
        assert_eq!(found.chunk_elements, mi * MI, "{name}");
        assert_eq!(cell(&units, mi), expected, "{name}");
    }
}

/// Spec patrickstar 8.1: minimum chunk sizes, in Mi with three decimals.
#[test]
fn smallest_chunks() {
    let at =
        |units: &[ModelUnit]| format!("{:.3}", smallest_chunk_elements(units) as f64 / MI as f64);
    let models = [
        ("GPT3_8B", "89.420", "36.012"),
        ("GPT3_12B", "119.227", "64.016"),
        ("GPT_DS_20B", "256.031", "256.031"),
        ("GPT_DS_68B", "324.035", "324.035"),
    ];
    for (name, chunks, host) in models {
        assert_eq!(at(&bert(name)), chunks, "{name}");
        assert_eq!(at(&on_host(name)), host, "{name}");
        let smallest = smallest_chunk_elements(&bert(name));
        assert!(pack(&bert(name), smallest).is_ok() && pack(&bert(name), smallest - 1).is_err());
    }
    assert_eq!(at(&tiled("GPT_DS_20B")), "238.453");
    assert_eq!(at(&tiled_on_host("GPT_DS_20B")), "64.008");
    let gpts = [("GPT3_8B", "147.237"), ("GPT3_12B", "196.316"), ("GPT_DS_20B", "392.633")];
    for (name, expected) in gpts {
        assert_eq!(at(&gpt(name)), expected, "{name}");
    }
}

/// Spec patrickstar 8.2: parameters in billions; 14 and 18 bytes of each in GB.
#[test]
fn model_data() {
    for (name, billions, ours, deepspeed) in [
        ("GPT3_6B", "6.1105", "85.5", "110.0"),
        ("GPT3_8B", "8.2630", "115.7", "148.7"),
        ("GPT3_12B", "12.2288", "171.2", "220.1"),
        ("GPT3_18B", "18.2702", "255.8", "328.9"),
        ("GPT_DS_20B", "20.4609", "286.5", "368.3"),
        ("GPT_DS_40B", "40.5962", "568.3", "730.7"),
        ("GPT_DS_68B", "67.6519", "947.1", "1217.7"),
        ("GPT_175B", "174.5002", "2443.0", "3141.0"),
    ] {
        let units = bert(name);
        let description = "bert".to_owned();
        let plan = fraglab::engine::plan_chunks(
            name.to_owned(),
            description,
            &units,
            None,
            Machine::default(),
        );
        let model = plan.model;
        assert_eq!(format!("{:.4}", model.elements as f64 / 1e9), billions, "{name}");
        assert_eq!(format!("{:.1}", model.model_data_bytes as f64 / 1e9), ours, "{name}");
        assert_eq!(format!("{:.1}", model.deepspeed_bytes as f64 / 1e9), deepspeed, "{name}");
        // What is allocated is at least that, by the utilization.
        let found = plan.fine.tightest.unwrap();
        assert_eq!(found.bytes, 14 * found.chunks * found.chunk_elements);
        let ideal = model.model_data_bytes as f64 / found.utilization;
        assert!((found.bytes as f64 - ideal).abs() < 1e-9 * ideal, "{name}");
    }
}

/// Spec patrickstar 1.5: the grid.
#[test]
fn the_shipped_grid_is_the_scripts() {
    let mi: Vec<u64> = shipped_grid().map(|elements| elements / MI).collect();
    assert_eq!(mi, [312, 280, 248, 216, 184, 152, 120, 88]);
    assert!(shipped_grid().all(|elements| elements % MI == 0));
}

/// Spec patrickstar 8.2, the feasibility facts, by the rules as PatrickStar has them: 235.0 GB.
#[test]
fn what_fits_by_the_search_rule() {
    let machine = Machine::default();
    let searched = |name: &str| search(&bert(name), shipped_grid(), &machine);
    for name in ["GPT3_12B", "GPT3_13B"] {
        assert!(best(&searched(name), Rule::Searched).is_some(), "{name}");
    }
    let gb = |bytes: u64| format!("{:.1}", bytes as f64 / 1e9);
    let at = |name: &str, mi| candidate(&bert(name), mi, &machine);
    let (fits, fails) = (at("GPT3_13B", 312), at("GPT3_13B", 248));
    assert_eq!((gb(fits.bytes).as_str(), fits.searched), ("201.5", None));
    let misfit = fails.searched.unwrap();
    assert_eq!((misfit.room, gb(misfit.have_bytes).as_str()), (Room::Together, "235.0"));
    assert_eq!(format!("{:.0}", misfit.need_bytes as f64 / 1e9), "240");

    let rows = searched("GPT3_15B");
    assert!(best(&rows, Rule::Searched).is_none());
    let least = tightest(&rows).unwrap();
    assert_eq!((least.chunk_elements, gb(least.bytes).as_str()), (280 * MI, "242.5"));
    assert_eq!(nearest(&rows, Rule::Searched).unwrap().0, least);
    let finer = at("GPT3_15B", 193);
    assert_eq!((gb(finer.bytes).as_str(), finer.searched), ("223.8", None));
}

/// Spec patrickstar 7.1, item 11: bytes are taken for elements, so twice the chunk passes.
#[test]
fn the_corrected_rule_asks_for_two_whole_chunks() {
    // Warm-up leaves 0.9 · 0.1 · gpu bytes: room for one chunk of 100 Mi elements, 200 MiB.
    let machine = |gpu_bytes| Machine { gpu_bytes, ..Machine::default() };
    let units = [unit("a", &[MI])];
    let at = |gpu_bytes| candidate(&units, 100, &machine(gpu_bytes));
    let two_thirds_of_a_gib = at(3 << 30);
    assert_eq!(two_thirds_of_a_gib.searched, None);
    let misfit = two_thirds_of_a_gib.corrected.unwrap();
    assert_eq!(misfit.room, Room::Warmup);
    assert_eq!((misfit.need_bytes, misfit.have_bytes), (400 * MI, 289_910_292));
    assert_eq!(at(5 << 30).corrected, None);
    assert_eq!(at(2 << 30).searched.map(|misfit| misfit.need_bytes), Some(200 * MI));
}

/// Eight GPUs of a host: each has its own warm-up room, whole chunks go to ranks.
#[test]
fn ranks_of_a_host_are_counted_with_their_whole_chunks() {
    let eight = Machine { ranks: 8, local_ranks: 8, ..Machine::default() };
    let found = candidate(&bert("GPT3_18B"), 312, &eight);
    assert_eq!((found.chunks, found.dummies), (61, 3));
    assert_eq!(found.rank_bytes, 14 * 312 * MI * 8);
    // 64 chunks' worth in 8 · 2.88 GiB and 216 GiB.
    let misfit = found.corrected.unwrap();
    assert_eq!(misfit.need_bytes, 64 * 14 * 312 * MI);
    // Each GPU's room is rounded down.
    let have = (8.0 * 0.9 * 0.1 * 32.0 + 0.9 * 240.0) * f64::from(1 << 30);
    assert!((misfit.have_bytes as f64 - have).abs() < 10.0);
}

fn unit(module: &str, elements: &[u64]) -> ModelUnit {
    let parameter = |(index, &elements): (usize, &u64)| ModelParameter {
        name: format!("{module}.{index}"),
        elements,
        frozen: false,
    };
    let parameters = elements.iter().enumerate().map(parameter).collect();
    ModelUnit { module: module.to_owned(), parameters, ..ModelUnit::default() }
}

/// The rule of spec patrickstar 1.4 word by word: a map of every chunk's elements, gaps looked for
/// first, then the end. Gives chunk and offset of every parameter; nothing if one unit fits nowhere.
fn literal_packing(units: &[ModelUnit], capacity: usize) -> Option<Vec<(usize, usize)>> {
    let mut chunks: Vec<Vec<bool>> = Vec::new();
    let mut places = Vec::new();
    for unit in units.iter().filter(|unit| !unit.host) {
        let sizes: Vec<usize> = unit.parameters.iter().map(|p| p.elements as usize).collect();
        let length = sizes.iter().sum::<usize>();
        let free_run = |chunk: &Vec<bool>| {
            (0..=capacity.checked_sub(length)?).find(|&at| !chunk[at..at + length].contains(&true))
        };
        let last = chunks.last().and_then(free_run);
        let mut at = match last {
            Some(at) => at,
            None => {
                chunks.push(vec![false; capacity]);
                free_run(chunks.last()?)?
            }
        };
        let index = chunks.len() - 1;
        for size in sizes {
            places.push((index, at));
            chunks[index][at..at + size].fill(true);
            at += size;
        }
    }
    Some(places)
}

fn small_units() -> impl Strategy<Value = Vec<ModelUnit>> {
    let sizes = prop::collection::vec(1u64..40, 1..4);
    let one = (sizes, prop::bool::weighted(0.1));
    prop::collection::vec(one, 0..40).prop_map(|all| {
        let named = all.into_iter().enumerate();
        named
            .map(|(index, (sizes, host))| ModelUnit { host, ..unit(&format!("m{index}"), &sizes) })
            .collect()
    })
}

proptest! {
    #[test]
    fn packing_is_the_literal_rule(units in small_units(), capacity in 1u64..200) {
        let expected = literal_packing(&units, capacity as usize);
        let found = pack(&units, capacity);
        prop_assert_eq!(found.is_ok(), smallest_chunk_elements(&units) <= capacity);
        prop_assert_eq!(found.is_ok(), expected.is_some());
        let row = search(&units, [capacity], &Machine::default()).remove(0);
        prop_assert_eq!(row.candidate.is_some(), found.is_ok());
        if let (Ok(layout), Some(expected)) = (found, expected) {
            let mut placed = Vec::new();
            let mut names = Vec::new();
            for (index, chunk) in layout.chunks.iter().enumerate() {
                for &PlacedTensor { unit, parameter, offset_elements, elements } in &chunk.tensors {
                    let of_unit = &units[unit as usize].parameters[parameter as usize];
                    prop_assert_eq!(of_unit.elements, elements);
                    names.push(&of_unit.name);
                    placed.push((index, offset_elements as usize));
                }
                let end = chunk.tensors.last().map(|last| last.offset_elements + last.elements);
                prop_assert_eq!(Some(chunk.used_elements), end);
            }
            prop_assert_eq!(placed, expected);
            let chunked = units.iter().filter(|unit| !unit.host);
            let all: Vec<_> = chunked.flat_map(|unit| &unit.parameters).map(|p| &p.name).collect();
            prop_assert_eq!(names, all);
            let candidate = row.candidate.unwrap();
            prop_assert_eq!(candidate.chunks, layout.chunks.len() as u64);
            prop_assert_eq!(candidate.utilization, layout.utilization());
        }
    }

    /// Machines of any size, models of any size: judging neither panics nor overflows.
    #[test]
    fn any_machine_gets_an_answer(
        elements in prop::collection::vec(1u64..1 << 56, 1..5),
        gpu_bytes: u64,
        host_bytes: u64,
        ranks in 0u32..5000,
        local_ranks in 0u32..10,
        working_bytes: u64,
        memory_saving: bool,
    ) {
        let units = [unit("m", &elements[..1]), unit("n", &elements)];
        let machine = Machine {
            gpu_bytes, host_bytes, ranks, local_ranks, working_bytes, memory_saving,
            ..Machine::default()
        };
        let sizes = fine_grid(&units).chain([1, u64::MAX]);
        let rows = search(&units, sizes, &machine);
        prop_assert!(rows.len() <= 402);
        for rule in [Rule::Searched, Rule::Corrected, Rule::Managed] {
            let found = best(&rows, rule);
            prop_assert!(found.is_some() != nearest(&rows, rule).is_some());
            let no_more = |row: &&fraglab::chunk::search::Row| {
                row.candidate.as_ref().is_some_and(|candidate| candidate.misfit(rule).is_none())
            };
            let least = rows.iter().filter(no_more).filter_map(|row| row.candidate.as_ref());
            let least = least.map(|candidate| candidate.rank_bytes).min();
            prop_assert_eq!(found.map(|candidate| candidate.rank_bytes), least);
        }
    }
}

/// Spec patrickstar 1.4: a module that is larger than a chunk stops the model from being built.
#[test]
fn a_model_that_cannot_be_built_is_told_with_the_size_that_would_do() {
    let error = pack(&bert("GPT_DS_20B"), 256 * MI).unwrap_err();
    assert_eq!(
        error.to_string(),
        "module `bert.encoder.layer.0.intermediate.dense` has 268468224 elements, which must lie \
         in one chunk of 268435456: this model needs chunks of at least 268468224 elements (257Mi)"
    );
    let vocabulary = pack(&bert("GPT3_12B"), 88 * MI).unwrap_err();
    assert!(
        matches!(&vocabulary, LayoutError::TooLarge { module, smallest_elements, .. }
            if module == "bert.embeddings.word_embeddings" && *smallest_elements == 30_522 * 4096),
        "{vocabulary}"
    );
}

/// Chunks of 1,000 elements and one tensor each, budgets by hand (spec patrickstar 2.3): F = 2,000
/// bytes, G = 100,000, host quota 1,000 F.
fn small_machine() -> Machine {
    Machine {
        gpu_bytes: 100_000,
        host_bytes: 2_000_000,
        gpu_ratio: 1.0,
        host_ratio: 1.0,
        warmup_ratio: 0.1,
        ..Machine::default()
    }
}

fn managed(chunks: usize, machine: &Machine) -> Option<(Room, u64, u64)> {
    let units: Vec<_> = (0..chunks).map(|index| unit(&format!("m{index}"), &[1000])).collect();
    let found = search(&units, [1000], machine).remove(0).candidate.expect("it holds the model");
    found.managed.map(|misfit| (misfit.room, misfit.need_bytes, misfit.have_bytes))
}

#[test]
fn the_managers_budgets_one_by_one() {
    let machine = small_machine();
    assert_eq!(managed(16, &machine), None);
    // When the model is built: 6 bytes an element on the host.
    let start = Machine { host_bytes: 95_999, ..machine.clone() };
    assert_eq!(managed(16, &start), Some((Room::HostAtStart, 96_000, 95_999)));
    // Two chunks beside working memory; a whole group and one more without memory saving.
    let tight = Machine { working_bytes: 96_001, ..machine.clone() };
    assert_eq!(managed(16, &tight), Some((Room::Gpu, 100_001, 100_000)));
    let collective =
        Machine { ranks: 4, memory_saving: false, working_bytes: 90_001, ..machine.clone() };
    assert_eq!(managed(16, &collective), Some((Room::Gpu, 100_001, 100_000)));
    // Ever after: 14 bytes an element on the host and beside working memory and one fetched chunk.
    let later = Machine { working_bytes: 90_000, host_bytes: 215_999, ..machine.clone() };
    assert_eq!(managed(16, &later), Some((Room::Together, 224_000, 223_999)));
    // ADAM keeps 8 F free: more than 14,000 and one chunk.
    let adam = Machine { working_bytes: 13_999, host_bytes: 139_999, ..machine };
    assert_eq!(managed(16, &adam), Some((Room::Together, 224_000, 223_999)));
}

/// The manager runs where the rule allows it with 4 F to spare, and is stopped where the rule lacks
/// 2 F or more (an ADAM chunk is 2 F, and moves whole): on GPUs and hosts of many sizes, with and
/// without working memory, on one rank and on four.
#[test]
fn the_manager_runs_what_the_rule_allows() {
    use crate::chunk::scenario::{CHUNK_ELEMENTS, F, Program};

    let (mut ran, mut stopped) = (0, 0);
    for (ranks, working) in [(1, 0), (1, 4), (4, 2)] {
        let program = Program {
            ranks,
            local_ranks: ranks,
            working_bytes: working * F,
            steps: 3,
            ..Program::equal(16 * ranks as usize)
        };
        for gpu in [20, 24, 32, 48] {
            for host in (80..=120).step_by(4) {
                let (gpu_bytes, host_bytes) = (gpu * F, host * F * u64::from(ranks));
                let machine = Machine {
                    gpu_bytes,
                    host_bytes,
                    ranks,
                    local_ranks: ranks,
                    gpu_ratio: 1.0,
                    host_ratio: 1.0,
                    // And the temporary gradient of a chunk.
                    working_bytes: (working + 1) * F,
                    ..Machine::default()
                };
                let model = program.trace().header.model.unwrap();
                let misfit = |host_bytes: u64| {
                    let machine = Machine { host_bytes, ..machine.clone() };
                    let rows = search(&model.units, [CHUNK_ELEMENTS], &machine);
                    rows[0].candidate.as_ref().unwrap().managed
                };
                let spec = format!(
                    "host={host_bytes}+overall_gpu_mem_ratio=1+overall_cpu_mem_ratio=1+\
                     with_mem_saving_comm=true"
                );
                // With ADAM's temporaries a GPU may hold more than its quota.
                let run = program.run_on(2 * gpu_bytes, gpu_bytes, &spec).summary;
                let runs = run.hard_stop.is_none();
                let case =
                    format!("{ranks} ranks, {working} F, GPU {gpu} F, host {host} F: {run:?}");
                if misfit(host_bytes - 4 * F * u64::from(ranks)).is_none() {
                    assert!(runs, "{case}");
                } else if misfit(host_bytes).is_some_and(|misfit| misfit.lacking_bytes() >= 2 * F) {
                    assert!(!runs, "{case}");
                } else {
                    continue;
                }
                if runs { ran += 1 } else { stopped += 1 }
            }
        }
    }
    assert!(ran > 20 && stopped > 20, "{ran} {stopped}");
}

/// Spec patrickstar 5, 5.1, 5.2 and 2.2, by hand for h = 8, a = 2, L = 3, B = 2, S = 4: u = 64,
/// a layer saves 34·64 + 5·2·16·2 = 2,496 bytes, its input is 128.
#[test]
fn activations_are_the_specs_count() {
    use fraglab::workload::{ActivationOffload, Head, Recompute, Shape};

    let shape = Shape {
        hidden: 8,
        heads: 2,
        kv_heads: 2,
        layers: 3,
        ffn: 32,
        vocabulary: 10,
        positions: 4,
        ..named("GPT3_8B").unwrap()
    };
    let mut job = job(shape);
    (job.train.batch, job.train.sequence) = (2, 4);
    let gpu = |job: &Job| activation_estimate(job, &units(job)).unwrap().gpu_bytes;
    // The largest linear has 4·64 + 32 elements, with 2 bytes of gradient and 4 of its copy.
    let gradient = 6 * 288;
    assert_eq!(gpu(&job), 3 * 2496 + gradient);
    job.strategy.recompute = Recompute::Every(1);
    assert_eq!(gpu(&job), 3 * 128 + 2496 + gradient);
    job.strategy.recompute = Recompute::Every(2);
    assert_eq!(gpu(&job), 2 * 128 + 2496 + 2496 + gradient);
    job.strategy.recompute = Recompute::Every(1);
    job.strategy.activation_offload = ActivationOffload::Checkpoints;
    let offloaded = activation_estimate(&job, &units(&job)).unwrap();
    assert_eq!((offloaded.gpu_bytes, offloaded.host_bytes), (128 + 2496 + gradient, 3 * 128));
    job.strategy.cpu_embedding = true;
    let on_host = activation_estimate(&job, &units(&job)).unwrap();
    assert_eq!(on_host.host_bytes, 3 * 128 + 16 * (10 + 4 + 2) * 8);
    // Large tables: their gradients stay until ADAM.
    job.strategy.cpu_embedding = false;
    job.shape.vocabulary = 10_000;
    assert_eq!(gpu(&job), 2 * (10_000 + 4 + 2) * 8);
    job.shape.head = Head::Lm;
    assert_eq!(gpu(&job), 2 * 4 * 10_000 * 10);
    job.shape.family = Family::Llama;
    assert_eq!(activation_estimate(&job, &units(&job)), None);
}
