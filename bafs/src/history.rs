//! `bafs replay` and `bafs why`: what a run did and why, from its journal. They run nothing.

use std::path::Path;

use anyhow::{Result, bail};
use bafs_sched::io::journal;
use bafs_sched::replay::{Line, replay};

use crate::args::{ReplayArgs, WhyArgs};
use crate::output::Output;

/// Tells all that happened in a run.
pub(crate) fn replay_all(args: &ReplayArgs, output: Output) -> Result<()> {
    say(&lines(&args.journal)?, output)
}

/// Tells what happened to one job, volume or node of a run.
pub(crate) fn why(args: &WhyArgs, output: Output) -> Result<()> {
    let all = lines(&args.journal)?;
    let is_about = |line: &Line| line.about.contains(&args.name);
    let told: Vec<Line> = all.iter().filter(|line| is_about(line)).cloned().collect();
    if told.is_empty() {
        bail!(
            "the journal {} says nothing about '{}': give the name of a job, a volume or a node of \
             that run (`bafs replay` lists everything)",
            args.journal.display(),
            args.name
        );
    }
    say(&told, output)
}

fn lines(path: &Path) -> Result<Vec<Line>> {
    let history = journal::read(path)?;
    Ok(replay(history).0)
}

fn say(lines: &[Line], output: Output) -> Result<()> {
    let text = |line: &Line| {
        let (seconds, ms) = (line.at_ms / 1_000, line.at_ms % 1_000);
        format!("{seconds:>6}.{ms:03} s  {}", line.text)
    };
    let text: Vec<String> = lines.iter().map(text).collect();
    output.say(&text.join("\n"), &lines)
}
