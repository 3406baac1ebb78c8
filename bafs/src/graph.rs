//! `bafs graph`: a workflow, or a run of it, as a graph in the DOT language. It runs nothing.

use std::fmt::Write;

use anyhow::{Context, Result, anyhow, bail};
use bafs_proto::path::is_control_or_bidirectional;
use bafs_sched::JobState;
use bafs_sched::io::journal;
use bafs_sched::replay::replay_history;
use bafs_sim::strategy_selector::ModelSelector;
use bafs_workflow::{JobIndex, VolumeKind, Workflow};

use crate::args::GraphArgs;
use crate::history;
use crate::home_view::HomeView;
use crate::output::{self, Printer};
use crate::workflow_file;

/// Prints the graph, or writes it to a file.
pub(crate) fn run(args: &GraphArgs, output: Printer) -> Result<()> {
    let is_journal = history::is_journal(&args.workflow).map_err(|error| {
        let here = history::describe_journals();
        anyhow!("{error:#}; name a workflow file, or the journal of a run: {here}")
    })?;
    let (workflow, states) = if is_journal {
        let (_, scheduler) = replay_history(journal::read_history(&args.workflow)?, &ModelSelector);
        let jobs = 0..scheduler.workflow().jobs.len() as u32;
        let states = jobs.map(|job| scheduler.job_state(JobIndex(job)));
        (
            scheduler.workflow().clone(),
            Some(states.collect::<Vec<_>>()),
        )
    } else {
        let start = history::read_prefix(&args.workflow, 4_096)?;
        if start.is_empty() || start.contains(&0) {
            bail!(
                "{} is neither a workflow nor a journal; name one of them",
                args.workflow.display()
            );
        }
        (
            workflow_file::load_workflow(
                &args.workflow,
                &HomeView::from_environment(&args.workflow),
            )?
            .into(),
            None,
        )
    };
    let dot = render_dot(&workflow, states.as_deref())?;
    match &args.output {
        Some(path) if !output::is_stdout(path) => {
            std::fs::write(path, dot).with_context(|| format!("cannot write {}", path.display()))
        }
        _ => output.print_result(dot.trim_end(), &serde_json::json!({ "dot": dot })),
    }
}

/// The graph: jobs as boxes, in the colour of their state where there is one; volumes as ellipses;
/// files that go home as notes.
pub(crate) fn render_dot(workflow: &Workflow, states: Option<&[JobState]>) -> Result<String> {
    let mut dot = format!("digraph {} {{\n", quote_dot(&workflow.name));
    dot += "  rankdir=LR;\n  node [fontname=\"sans-serif\", style=filled, fillcolor=white];\n";
    for (at, job) in workflow.jobs.iter().enumerate() {
        let state = states.and_then(|states| states.get(at));
        let colour = state.map_or("white", |state| state_colour(*state));
        let label = quote_dot(&job.name);
        writeln!(
            dot,
            "  j{at} [shape=box, fillcolor={colour}, label={label}];"
        )?;
        for parent in &job.parents {
            writeln!(dot, "  j{} -> j{at};", parent.0)?;
        }
        for mount in &job.mounts {
            let volume = mount.volume.0;
            let (path, from_to) = (
                quote_dot(&mount.path),
                (format!("v{volume}"), format!("j{at}")),
            );
            let ends = if mount.writable { "both" } else { "forward" };
            let (from, to) = from_to;
            writeln!(
                dot,
                "  {from} -> {to} [style=dashed, dir={ends}, fontsize=9, label={path}];"
            )?;
        }
    }
    for (at, volume) in workflow.volumes.iter().enumerate() {
        let (kind, colour) = match &volume.kind {
            VolumeKind::Scratch { .. } => ("scratch", "gray92"),
            VolumeKind::Cache { .. } => ("cache", "lightcyan"),
        };
        let size = match volume.size_bytes {
            0 => "size unknown".to_owned(),
            bytes => format!("{bytes} bytes"),
        };
        let label = format!("{}\n{kind}, {size}", volume.name);
        let label = quote_dot(&label);
        writeln!(
            dot,
            "  v{at} [shape=ellipse, fillcolor={colour}, label={label}];"
        )?;
    }
    for (at, extract) in workflow.extracts.iter().enumerate() {
        let label = quote_dot(&extract.target.to_string());
        writeln!(dot, "  e{at} [shape=note, label={label}];")?;
        writeln!(dot, "  v{} -> e{at};", extract.volume.0)?;
    }
    dot += "}\n";
    Ok(dot)
}

fn state_colour(state: JobState) -> &'static str {
    match state {
        JobState::Waiting => "white",
        JobState::Ready => "lightyellow",
        JobState::HeldBack => "orange",
        JobState::Active => "lightskyblue",
        JobState::Done => "palegreen",
        JobState::Failed => "tomato",
        JobState::Skipped => "gray70",
    }
}

/// A string of the DOT language that shows the text, whatever is in it.
fn quote_dot(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted += "\\\"",
            '\\' => quoted += "\\\\",
            '\n' => quoted += "\\n",
            c if is_control_or_bidirectional(c) => quoted.push('\u{fffd}'),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    #[test]
    fn the_graph_has_every_part_and_colours_states() {
        let text = "volume b bafs://home/data 1 MB\nvolume p scratch 1 MB\n\
            job a {\nexecutable = /bin/true\n}\njob c {\nexecutable = /bin/true\n}\n\
            parent a child c\nmount b a /data\nmount p a /scratch\nmount p c /scratch\n\
            extract p x bafs://home/x\n";
        let mut workflow = parse_workflow("w.bafs", text, &|path| Err(path.to_owned()))
            .expect("it parses")
            .workflow;
        workflow.jobs[0].name = "a\"]; evil [x=\"\\".to_owned();
        let plain = render_dot(&workflow, None).expect("a graph");
        for part in [
            "j0 -> j1;",
            "v0 -> j0 [style=dashed, dir=forward",
            "v1 -> j1 [style=dashed, dir=both",
            "v1 -> e0;",
            "label=\"a\\\"]; evil [x=\\\"\\\\\"]",
        ] {
            assert!(plain.contains(part), "{part} is missing:\n{plain}");
        }
        assert!(!plain.contains("palegreen"));
        let states = [JobState::Done, JobState::Failed];
        let coloured = render_dot(&workflow, Some(&states)).expect("a graph");
        assert!(coloured.contains("j0 [shape=box, fillcolor=palegreen"));
        assert!(coloured.contains("j1 [shape=box, fillcolor=tomato"));
    }
}
