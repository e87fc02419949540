//! The answer of `plan-chunks`: the model, a row a chunk size, the best.

use super::grid::{Align, Cell, Grid};
use super::{SizeUnit, Style, Tone, counted, grouped, percent, printable, wrapped};
use crate::chunk::layout::MI;
use crate::chunk::search::{Candidate, Machine, Room, Row, Rule};
use crate::engine::{Choice, ChunkPlan, ChunkedModel};
use crate::units::Bytes;

/// How wide the names of lines are.
const INDENT: &str = "                 ";

/// Chunk sizes for a model on a machine.
pub fn chunks(plan: &ChunkPlan, style: Style) -> String {
    let mut text = model(&plan.model, style);
    text.push_str(&machine(&plan.machine));
    text.push('\n');
    text.push_str(&sizes(plan).render(style));
    text.push('\n');
    text.push_str(&choices(plan).render(style));
    text
}

fn line(name: &str, value: &str) -> String {
    wrapped(&format!("  {name:<15}"), value, INDENT)
}

fn model(model: &ChunkedModel, style: Style) -> String {
    let mut text = style.paint(Tone::Heading, &printable(&model.name));
    text.push_str(&format!(": {}\n", model.description));
    let parameters =
        format!("{} in {}", counted(model.elements, "parameter"), counted(model.modules, "module"));
    text.push_str(&line("model", &parameters));
    if model.host_elements > 0 {
        let on_host = format!("{} of them on the host, in no chunk", grouped(model.host_elements));
        text.push_str(&line("", &on_host));
    }
    let data = format!(
        "{} at 14 bytes a parameter; DeepSpeed's 18 would be {}",
        Bytes(model.model_data_bytes),
        Bytes(model.deepspeed_bytes)
    );
    text.push_str(&line("model data", &data));
    if model.smallest_chunk_elements > 0 {
        let largest = format!(
            "{}, {} elements: chunks of {:.3}Mi and more hold it",
            printable(&model.largest_module),
            grouped(model.smallest_chunk_elements),
            model.smallest_chunk_elements as f64 / MI as f64
        );
        text.push_str(&line("largest", &largest));
    }
    text
}

fn machine(machine: &Machine) -> String {
    let of_host = match machine.ranks.div_ceil(machine.local_ranks.max(1)) {
        1 => String::new(),
        hosts => format!(" each on {hosts} hosts"),
    };
    let machine_line = format!(
        "{} of {}{of_host}, {} a host; shares used {}, {} of the host, {} in warm-up",
        counted(u64::from(machine.local_ranks), "GPU"),
        Bytes(machine.gpu_bytes),
        Bytes(machine.host_bytes),
        machine.gpu_ratio,
        machine.host_ratio,
        machine.warmup_ratio,
    );
    let mut text = line("machine", &machine_line);
    if machine.working_bytes > 0 || machine.host_working_bytes > 0 {
        let beside = format!(
            "{} of a GPU and {} of the host, a rank",
            Bytes(machine.working_bytes),
            Bytes(machine.host_working_bytes)
        );
        text.push_str(&line("beside chunks", &beside));
    }
    text
}

/// A row a chunk size.
fn sizes(plan: &ChunkPlan) -> Grid {
    let ranks = plan.machine.ranks > 1;
    let unit = unit(plan);
    let all = format!("data {}", unit.name);
    let mut titles = vec!["  chunk", "chunks", "used", &all];
    let mut aligns = vec![Align::Right; 4];
    if ranks {
        titles.push("a rank");
        aligns.push(Align::Right);
    }
    titles.extend(["searched", "corrected", "managed"]);
    aligns.extend([Align::Left; 3]);
    let mut grid = Grid::new(&aligns);
    grid.head(titles);
    for row in &plan.rows {
        grid.row(size_cells(row, ranks, unit), String::new());
    }
    grid
}

fn size_cells(row: &Row, ranks: bool, unit: SizeUnit) -> Vec<Cell> {
    let mut cells = vec![Cell::from(mi(row.chunk_elements))];
    let Some(candidate) = &row.candidate else {
        cells.resize(if ranks { 5 } else { 4 }, Cell::from(String::new()));
        cells.push(Cell::toned("too small", Tone::Bad));
        return cells;
    };
    cells.extend(amounts(candidate, ranks, unit));
    for misfit in [candidate.searched, candidate.corrected, candidate.managed] {
        cells.push(match misfit {
            None => Cell::toned("fits", Tone::Good),
            Some(misfit) => {
                let lacking = unit.cell(misfit.lacking_bytes());
                Cell::toned(format!("{} -{lacking}", short(misfit.room)), Tone::Bad)
            }
        });
    }
    cells
}

fn amounts(candidate: &Candidate, ranks: bool, unit: SizeUnit) -> Vec<Cell> {
    let mut cells = vec![
        Cell::from(grouped(candidate.chunks)),
        percent(candidate.utilization).into(),
        unit.cell(candidate.bytes).into(),
    ];
    if ranks {
        cells.push(unit.cell(candidate.rank_bytes).into());
    }
    cells
}

/// The best by each rule, on both grids.
fn choices(plan: &ChunkPlan) -> Grid {
    let ranks = plan.machine.ranks > 1;
    let unit = unit(plan);
    let all = format!("data {}", unit.name);
    let mut aligns = vec![Align::Left; 2];
    aligns.extend([Align::Right; 4]);
    let mut titles = vec!["  best", "grid", "chunk", "chunks", "used", &all];
    if ranks {
        titles.push("a rank");
        aligns.push(Align::Right);
    }
    let mut grid = Grid::new(&aligns);
    grid.head(titles);
    let grids = [("88..312Mi", &plan.shipped), ("every Mi", &plan.fine)];
    for (name, best) in grids {
        let cells = choice_cells("least memory", name, best.tightest.as_ref(), ranks, unit);
        grid.row(cells, String::new());
    }
    let rules =
        [("searched", Rule::Searched), ("corrected", Rule::Corrected), ("managed", Rule::Managed)];
    for (word, rule) in rules {
        for (name, best) in grids {
            let choice = best.choice(rule);
            let cells = choice_cells(word, name, choice.best.as_ref(), ranks, unit);
            grid.row(cells, reason(choice));
        }
    }
    grid
}

fn choice_cells(
    rule: &str,
    grid: &str,
    best: Option<&Candidate>,
    ranks: bool,
    unit: SizeUnit,
) -> Vec<Cell> {
    let mut cells = vec![Cell::from(format!("  {rule}")), grid.to_owned().into()];
    match best {
        Some(candidate) => {
            cells.push(Cell::from(mi(candidate.chunk_elements)));
            cells.extend(amounts(candidate, ranks, unit));
        }
        None => cells.push(Cell::toned("none", Tone::Bad)),
    }
    cells
}

/// Why nothing was chosen.
fn reason(choice: &Choice) -> String {
    let (Some(elements), Some(misfit)) = (choice.nearest_elements, choice.misfit) else {
        return String::new();
    };
    let why = format!(
        "nearest {}: {} needs {}, {} is there",
        mi(elements),
        long(misfit.room),
        Bytes(misfit.need_bytes),
        Bytes(misfit.have_bytes)
    );
    wrapped("    ", &why, "    ")
}

/// The unit of all sizes.
fn unit(plan: &ChunkPlan) -> SizeUnit {
    let rows = plan.rows.iter().filter_map(|row| row.candidate.as_ref());
    SizeUnit::fitting(rows.map(|candidate| candidate.bytes).max().unwrap_or(0))
}

/// `64Mi`; elements where it is no whole number of Mi.
fn mi(elements: u64) -> String {
    if elements.is_multiple_of(MI) { format!("{}Mi", elements / MI) } else { grouped(elements) }
}

fn short(room: Room) -> &'static str {
    match room {
        Room::Warmup => "warm-up",
        Room::Together => "memory",
        Room::HostAtStart => "start",
        Room::Gpu => "GPU",
    }
}

fn long(room: Room) -> &'static str {
    match room {
        Room::Warmup => "a GPU's room for chunks in warm-up",
        Room::Together => "model data on GPUs and host together",
        Room::HostAtStart => "the host when the model is built",
        Room::Gpu => "a GPU for working memory and the chunks in use",
    }
}
