//! `bafs logs --follow`: what a job prints, while it runs. The run asks the job's node; here its
//! answers are read, and what is new of them is printed.

use std::io::{self, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use bafs_sched::io::followed_output::{FollowRequest, read_followed};
use bafs_sched::io::job_logs::{LoggedAttempt, is_in_use, read_index};
use bafs_server::clock;

use crate::terminal_text;

/// Pause between two looks.
const INTERVAL: Duration = Duration::from_millis(500);

/// A person is told why nothing is printed after so long, in milliseconds.
const NOTICE_DELAY_MS: u64 = 5_000;

/// Of what was printed, so many bytes must be found again to go on behind them.
const OVERLAP_BYTES: usize = 1_024;

/// Which streams are printed: standard output, standard error.
pub(crate) type WantedStreams = [bool; 2];

/// Prints what a job prints from now on, until an attempt succeeds, the job is given up or the run
/// ends. `is_over` tells of the job, if anybody knows.
pub(crate) fn follow_job(
    logs: &Path,
    job: &str,
    wanted: WantedStreams,
    is_over: impl Fn() -> Option<bool>,
) -> Result<()> {
    let request = FollowRequest::send(logs, job)
        .with_context(|| format!("cannot ask the run in {}", logs.display()))?;
    let mut shown = [Vec::new(), Vec::new()];
    let mut attempt = last_attempt(logs, job)?.map_or(1, |last| last.attempt + 1);
    let began = clock::now();
    let mut is_told = false;
    loop {
        // First: what ends now is in the list then.
        let is_run_over = !is_in_use(logs)?;
        let ended = last_attempt(logs, job)?.filter(|last| last.attempt >= attempt);
        let printed = match &ended {
            Some(ended) => read_kept(logs, ended)?,
            None => read_followed(logs, job, attempt)?,
        };
        print_news(&mut shown, &printed, wanted)?;
        if let Some(ended) = ended {
            let (name, node) = (&ended.job, &ended.node);
            eprintln!(
                "bafs: job {name}, attempt {} on node {node}: {}",
                ended.attempt, ended.end_description
            );
            if !ended.has_failed || is_over() == Some(true) {
                return Ok(());
            }
            attempt = ended.attempt + 1;
            shown = [Vec::new(), Vec::new()];
        }
        if is_run_over {
            eprintln!("bafs: the run has ended");
            return Ok(());
        }
        if !is_told
            && shown.iter().all(Vec::is_empty)
            && clock::now().ms_since(began) > NOTICE_DELAY_MS
        {
            eprintln!("bafs: job {job} has printed nothing yet, or does not run");
            is_told = true;
        }
        thread::sleep(INTERVAL);
        request.repeat()?;
    }
}

/// The last attempt of a job that has ended.
fn last_attempt(logs: &Path, job: &str) -> Result<Option<LoggedAttempt>> {
    let attempts = match read_index(logs) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        read => read.with_context(|| format!("cannot read {}", logs.display()))?,
    };
    Ok(attempts.into_iter().rev().find(|it| it.job == job))
}

/// What is kept of an attempt that has ended.
fn read_kept(logs: &Path, attempt: &LoggedAttempt) -> Result<[Vec<u8>; 2]> {
    let mut kept = [Vec::new(), Vec::new()];
    for (kept, path) in kept.iter_mut().zip(attempt.log_paths(logs)) {
        *kept = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.with_context(|| format!("cannot read {}", path.display()))?,
        };
    }
    Ok(kept)
}

/// Prints what was not there at the last look.
fn print_news(
    shown: &mut [Vec<u8>; 2],
    printed: &[Vec<u8>; 2],
    wanted: WantedStreams,
) -> io::Result<()> {
    for (stream, (shown, printed)) in shown.iter_mut().zip(printed).enumerate() {
        let text = String::from_utf8_lossy(find_news(shown, printed)).into_owned();
        shown.clone_from(printed);
        if !wanted[stream] || text.is_empty() {
            continue;
        }
        let text = terminal_text::sanitize_lines(&text);
        match stream {
            0 => write_all(io::stdout().lock(), &text)?,
            _ => write_all(io::stderr().lock(), &text)?,
        }
    }
    Ok(())
}

fn write_all(mut to: impl Write, text: &str) -> io::Result<()> {
    to.write_all(text.as_bytes())?;
    to.flush()
}

/// What of a stream came since the last look, where its middle may be left out by now.
fn find_news<'p>(shown: &[u8], printed: &'p [u8]) -> &'p [u8] {
    if let Some(news) = printed.strip_prefix(shown) {
        return news;
    }
    let known = &shown[shown.len().saturating_sub(OVERLAP_BYTES)..];
    let mut places = printed.windows(known.len().max(1));
    match places.rposition(|part| part == known) {
        Some(at) => &printed[at + known.len()..],
        // Even that is left out.
        None => printed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_output_is_printed() {
        assert_eq!(find_news(b"", b"one\n"), b"one\n");
        assert_eq!(find_news(b"one\n", b"one\ntwo\n"), b"two\n");
        assert_eq!(find_news(b"one\n", b"one\n"), b"");
        let known: Vec<u8> = (0..5_000u32).flat_map(|at| at.to_le_bytes()).collect();
        let tail = &known[known.len() - 2_000..];
        let left_out = [b"head [... left out ...]", tail, b"news"].concat();
        assert_eq!(find_news(&known, &left_out), b"news");
        assert_eq!(find_news(&known, b"all is new"), b"all is new");
    }
}
