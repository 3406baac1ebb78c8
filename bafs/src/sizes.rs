//! Sizes that volumes had in runs, from the journal: `bafs sizes` proposes declarations of them,
//! and `bafs why VOLUME` tells them. It changes no file.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use bafs_sched::Event;
use bafs_sched::io::journal::{self, History};
use bafs_workflow::{FILE_BYTES_MAX, VolumeKind};
use serde::Serialize;

use crate::args::SizesArgs;
use crate::history::find_journal;
use crate::input_file;
use crate::output::Printer;

/// What the scheduler reserves beyond what it measured, too: a quarter, at least a megabyte.
const MARGIN_DIVISOR: u64 = 4;
const MARGIN_BYTES_MIN: u64 = 1 << 20;
const MEGABYTE: u64 = 1_000_000;

/// A scratch volume of a workflow, and the most that it held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct MeasuredVolume {
    /// Its name.
    pub(crate) name: String,
    /// The size that the workflow declares, in bytes; none if it is `unknown`.
    pub(crate) declared_bytes: Option<u64>,
    /// The most bytes that it held at the end of a job; none if no job ended that mounts it.
    pub(crate) held_bytes: Option<u64>,
    /// The most files and directories.
    pub(crate) held_files: Option<u64>,
}

/// The scratch volumes of the workflow of a journal, in the order of declaration.
pub(crate) fn measure_volumes(history: &History) -> Vec<MeasuredVolume> {
    let mut held: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for step in &history.steps {
        let Event::JobEnded { report, .. } = &step.event else {
            continue;
        };
        for used in &report.volumes {
            let (bytes, files) = held.entry(&used.name).or_default();
            *bytes = (*bytes).max(used.used_bytes);
            *files = (*files).max(used.used_files);
        }
    }
    let volumes = history.header.workflow.volumes.iter();
    let scratch = volumes.filter(|it| matches!(it.kind, VolumeKind::Scratch { .. }));
    let measured = scratch.map(|volume| {
        let held = held.get(volume.name.as_str());
        MeasuredVolume {
            name: volume.name.clone(),
            declared_bytes: (volume.size_bytes > 0).then_some(volume.size_bytes),
            held_bytes: held.map(|(bytes, _)| *bytes),
            held_files: held.map(|(_, files)| *files),
        }
    });
    measured.collect()
}

/// What a run measured of a volume, in a sentence; nothing if it is no scratch volume, or no job
/// with it ended.
pub(crate) fn describe_measured_size(history: &History, name: &str) -> Option<String> {
    let volumes = measure_volumes(history);
    let volume = volumes.iter().find(|volume| volume.name == name)?;
    let (bytes, files) = (volume.held_bytes?, volume.held_files?);
    let size = match volume.declared_bytes {
        Some(declared) => format!("its declared size is {declared} bytes"),
        None => "its size is unknown in the workflow".to_owned(),
    };
    Some(format!(
        "volume {name} held up to {bytes} bytes and {files} files; {size}"
    ))
}

/// A line of a workflow, and the line to put in its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct ProposedLine {
    /// Its number, from 1.
    line: usize,
    before: String,
    after: String,
}

/// Runs `bafs sizes`.
pub(crate) fn propose_sizes(args: &SizesArgs, output: Printer) -> Result<()> {
    let text = input_file::read_text(&args.workflow, FILE_BYTES_MAX).context("the workflow")?;
    let journal = match &args.journal {
        Some(journal) => journal.clone(),
        None => find_journal(&args.workflow)?,
    };
    let volumes = measure_volumes(&journal::read_history(&journal)?);
    let lines = propose_lines(&text, &volumes);
    let name = args.workflow.display().to_string();
    let shown = match lines.is_empty() {
        true => describe_volumes(&volumes),
        false => format_patch(&name, &text, &lines),
    };
    let value = serde_json::json!({ "volumes": volumes, "proposals": lines });
    output.print_result(shown.trim_end(), &value)
}

/// Declarations of unknown size whose volumes were measured, with a size.
fn propose_lines(text: &str, volumes: &[MeasuredVolume]) -> Vec<ProposedLine> {
    let propose = |(at, line): (usize, &str)| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [keyword, name, kind, size, ..] = words.as_slice() else {
            return None;
        };
        let is_word = |word: &str, wanted: &str| word.eq_ignore_ascii_case(wanted);
        if !is_word(keyword, "volume") || !is_word(kind, "scratch") || !is_word(size, "unknown") {
            return None;
        }
        let unknown = volumes
            .iter()
            .filter(|volume| volume.declared_bytes.is_none());
        let alike = unknown.filter(|volume| is_named_by(&volume.name, name));
        let held = alike.filter_map(|volume| volume.held_bytes).max()?;
        let start = line.find(size)?;
        let after = format!(
            "{}{}{}",
            &line[..start],
            format_size(held),
            &line[start + size.len()..]
        );
        Some(ProposedLine {
            line: at + 1,
            before: line.to_owned(),
            after,
        })
    };
    text.lines().enumerate().filter_map(propose).collect()
}

/// Whether a declared name, in which loop variables stand for any text, names a volume.
fn is_named_by(volume: &str, declared: &str) -> bool {
    let Some((before, rest)) = declared.split_once("$(") else {
        return volume == declared;
    };
    let Some(after_prefix) = volume.strip_prefix(before) else {
        return false;
    };
    let after = rest.split_once(')').map_or("", |(_, after)| after);
    // The variable has at least one letter.
    let mut ends = after_prefix
        .char_indices()
        .skip(1)
        .map(|(at, _)| at)
        .collect::<Vec<_>>();
    ends.push(after_prefix.len());
    !after_prefix.is_empty()
        && ends
            .into_iter()
            .any(|at| is_named_by(&after_prefix[at..], after))
}

fn format_size(held_bytes: u64) -> String {
    let margin = (held_bytes / MARGIN_DIVISOR).max(MARGIN_BYTES_MIN);
    format!(
        "{} MB",
        held_bytes.saturating_add(margin).div_ceil(MEGABYTE)
    )
}

/// A patch that `patch` applies.
fn format_patch(name: &str, text: &str, lines: &[ProposedLine]) -> String {
    let count = text.lines().count();
    let mut patch = format!("--- {name}\n+++ {name}\n");
    for proposed in lines {
        let at = proposed.line.min(count);
        patch.push_str(&format!(
            "@@ -{at} +{at} @@\n-{}\n+{}\n",
            proposed.before, proposed.after
        ));
    }
    patch
}

fn describe_volumes(volumes: &[MeasuredVolume]) -> String {
    let mut lines = vec!["no volume of unknown size was measured".to_owned()];
    for volume in volumes {
        let held = match volume.held_bytes {
            Some(bytes) => format!("held up to {bytes} bytes"),
            None => "was not measured".to_owned(),
        };
        let size = match volume.declared_bytes {
            Some(bytes) => format!("declared {bytes} bytes"),
            None => "unknown size".to_owned(),
        };
        lines.push(format!("{}: {size}, {held}", volume.name));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str, held_bytes: u64) -> MeasuredVolume {
        MeasuredVolume {
            name: name.to_owned(),
            declared_bytes: None,
            held_bytes: Some(held_bytes),
            held_files: Some(1),
        }
    }

    #[test]
    fn loops_get_the_largest_measured_size() {
        let text = "for i in 1..2\n  volume w$(i) scratch unknown files 9  # raw\nend\n\
                    volume x scratch 1 MB\nvolume y scratch unknown\n";
        let volumes = [volume("w1", 8_000_000), volume("w2", 20_000_000)];
        let lines = propose_lines(text, &volumes);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_eq!(lines[0].line, 2);
        assert_eq!(
            lines[0].after,
            "  volume w$(i) scratch 25 MB files 9  # raw"
        );
        let patch = format_patch("w.bafs", text, &lines);
        assert!(
            patch.contains("@@ -2 +2 @@\n-  volume w$(i) scratch unknown"),
            "{patch}"
        );
    }

    #[test]
    fn loop_variables_stand_for_any_text() {
        assert!(is_named_by("w12_x", "w$(i)_x"));
        assert!(is_named_by("a.1.b", "a.$(i).$(s)"));
        assert!(!is_named_by("w_x", "w$(i)_x"));
        assert!(!is_named_by("v1", "w$(i)"));
        assert!(is_named_by("w", "w"));
    }
}
