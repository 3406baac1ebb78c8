//! Failures of jobs as a person reads them: those that are alike are told once, with a count.

use std::collections::BTreeMap;

use bafs_sched::JobFailure;

use crate::terminal_text;

/// Most lines of a job's output that a failure shows, and their longest length, in characters.
const LINES_SHOWN_MAX: usize = 20;
const COLUMNS_SHOWN_MAX: usize = 500;

/// Kinds of failures that are told one by one.
const GROUPS_SHOWN_MAX: usize = 20;

/// Most names of jobs that failed alike.
const NAMES_SHOWN_MAX: usize = 5;

/// One line or more for each kind of failure, in the order of the first of each.
pub(crate) fn describe_failures(failures: &[JobFailure]) -> String {
    let mut groups: Vec<Vec<&JobFailure>> = Vec::new();
    let mut known = BTreeMap::new();
    for failure in failures {
        // What nodes say of a job has its name in quotes.
        let reason = failure.reason.replace(&format!("'{}'", failure.name), "");
        let group = *known
            .entry((reason, last_lines(&failure.output_tail)))
            .or_insert_with(|| {
                groups.push(Vec::new());
                groups.len() - 1
            });
        groups[group].push(failure);
    }
    let mut text = String::new();
    for group in groups.iter().take(GROUPS_SHOWN_MAX) {
        let [first, others @ ..] = group.as_slice() else {
            continue;
        };
        text += &format!("\n{first}");
        for line in last_lines(&first.output_tail) {
            text += &format!("\n    {line}");
        }
        if !others.is_empty() {
            text += &format!(
                "\n  and {} likewise: {}",
                count_jobs(others.len()),
                names(others)
            );
        }
    }
    let more: usize = groups.iter().skip(GROUPS_SHOWN_MAX).map(Vec::len).sum();
    if more > 0 {
        text += &format!("\nand {} failed for other reasons", count_jobs(more));
    }
    text
}

fn count_jobs(count: usize) -> String {
    match count {
        1 => "1 more job".to_owned(),
        _ => format!("{count} more jobs"),
    }
}

fn names(failures: &[&JobFailure]) -> String {
    let shown = failures.iter().take(NAMES_SHOWN_MAX);
    let shown: Vec<&str> = shown.map(|failure| failure.name.as_str()).collect();
    match failures.len().saturating_sub(NAMES_SHOWN_MAX) {
        0 => shown.join(", "),
        _ => format!("{}, …", shown.join(", ")),
    }
}

/// The last lines of a job's output, short and without what would steer a terminal; `--json` has
/// all that was kept.
fn last_lines(output: &str) -> Vec<String> {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN_MAX)..]
        .iter()
        .map(|line| {
            terminal_text::sanitize_lines(&line.chars().take(COLUMNS_SHOWN_MAX).collect::<String>())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use bafs_workflow::JobIndex;

    use super::*;

    fn failure(job: u32, reason: &str, output_tail: &str) -> JobFailure {
        JobFailure {
            job: JobIndex(job),
            name: format!("map{job}"),
            node: "n1".to_owned(),
            reason: reason.to_owned(),
            output_tail: output_tail.to_owned(),
        }
    }

    #[test]
    fn like_failures_are_told_once() {
        let missing = |job: u32| {
            let reason = format!("job 'map{job}' ran longer than 1 s");
            failure(job, &reason, "no index\n")
        };
        let mut failures: Vec<JobFailure> = (0..9).map(missing).collect();
        failures.insert(3, failure(77, "exited with code 2", "no index\n"));
        failures.push(failure(78, "exited with code 2", "no such file\n"));
        let told = describe_failures(&failures);
        let expected = "\njob map0 failed on n1: job 'map0' ran longer than 1 s\n    no index\n  \
                        and 8 more jobs likewise: map1, map2, map3, map4, map5, …\n\
                        job map77 failed on n1: exited with code 2\n    no index\n\
                        job map78 failed on n1: exited with code 2\n    no such file";
        assert_eq!(told, expected);
    }

    #[test]
    fn many_kinds_of_failures_are_counted() {
        let failures: Vec<JobFailure> = (0..50)
            .map(|job| failure(job, &format!("exited with code {job}"), ""))
            .collect();
        let told = describe_failures(&failures);
        assert_eq!(told.lines().count(), 1 + GROUPS_SHOWN_MAX + 1);
        assert!(
            told.ends_with("and 30 more jobs failed for other reasons"),
            "{told}"
        );
    }

    #[test]
    fn report_shortens_output_and_escapes_control_characters() {
        let flood = "x".repeat(60_000);
        let output = format!("{}{flood}\n\u{1b}[2Jthe end\n", "line\n".repeat(1_000));
        let shown = last_lines(&output);
        assert_eq!(shown.len(), LINES_SHOWN_MAX);
        assert_eq!(shown[LINES_SHOWN_MAX - 2].len(), COLUMNS_SHOWN_MAX);
        assert_eq!(shown[LINES_SHOWN_MAX - 1], "\u{fffd}[2Jthe end");
    }
}
