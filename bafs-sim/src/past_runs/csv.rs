//! Past jobs from a table of our own form. Knows no batch system.

use std::collections::BTreeMap;

use bafs_workflow::EDGES_MAX;

use super::table::{Row, TableFormat, TextTable};
use super::workload::{PastJob, build_workload};
use super::{JOBS_MAX, PastError, PastRun};

/// Processors of one job; more is a typing error.
pub(super) const CPUS_MAX: u32 = 65_536;

const COLUMNS: [&str; 8] = [
    "job",
    "runtime",
    "cpus",
    "after",
    "shared",
    "shared-bytes",
    "input",
    "output",
];

/// Reads past jobs from comma-separated values. The first line names the columns, in any order:
///
/// ```csv
/// job,runtime,cpus,after,shared,shared-bytes,input,output
/// a1,62.5,1,,reference,40 GB,100 MB,2 GB
/// b1,1 h,4,a1,,,,30 MB
/// ```
///
/// `job` and `runtime` are needed. `after` names jobs whose output is read, with spaces between
/// them; jobs that read the same `shared` data share a cache; `input` comes from home for this job
/// alone; `output` goes home when no job reads it. Numbers alone are seconds and bytes.
///
/// # Errors
/// With the line and the expected content.
pub fn from_csv(name: &str, text: &str) -> Result<PastRun, PastError> {
    let table = TextTable::parse(text, TableFormat::CommaSeparated)?;
    table.check_columns(&COLUMNS, &["job", "runtime"])?;
    let mut at = BTreeMap::new();
    for row in table.rows() {
        let job = row.text("job");
        if job.is_empty() {
            return Err(PastError::at_line(row.line, "the job has no name"));
        }
        if let Some((line, _)) = at.insert(job, (row.line, at.len())) {
            let message = format!("job '{job}' is a duplicate of line {line}");
            return Err(PastError::at_line(row.line, message));
        }
    }
    if at.is_empty() {
        return Err(PastError::Unusable(
            "the file has no jobs below the header".to_owned(),
        ));
    }
    if at.len() > JOBS_MAX {
        let message = format!("{} jobs are too many; the limit is {JOBS_MAX}", at.len());
        return Err(PastError::Unusable(message));
    }
    let mut jobs = Vec::with_capacity(at.len());
    let mut edges = 0;
    for row in table.rows() {
        let job = parse_job(&row, &at)?;
        edges += job.parents.len() as u64;
        if edges > EDGES_MAX {
            let message = format!(
                "the column has more than {EDGES_MAX} job names; that is the \
                                   limit"
            );
            return Err(row.error("after", message));
        }
        jobs.push(job);
    }
    let (workflow, measured) = build_workload(name, &jobs)?;
    Ok(PastRun {
        workflow,
        measured,
        duration_s: None,
        began_at: None,
        site: None,
        job_lines: jobs.iter().map(|job| job.line).collect(),
        remarks: Vec::new(),
    })
}

fn parse_job(row: &Row<'_>, at: &BTreeMap<&str, (usize, usize)>) -> Result<PastJob, PastError> {
    let mut after = Vec::new();
    for parent in row.text("after").split_whitespace() {
        let Some((_, at)) = at.get(parent) else {
            return Err(row.error("after", format!("unknown job '{parent}'")));
        };
        after.push(*at);
    }
    let set = row.text("shared");
    let shared_bytes = row.size("shared-bytes")?;
    if set.is_empty() != (shared_bytes == 0) {
        let why = "`shared` (name of the data) and `shared-bytes` (their size) need each other";
        return Err(row.error("shared", why));
    }
    Ok(PastJob {
        line: row.line,
        name: row.text("job").to_owned(),
        cpus: match row.text("cpus") {
            "" => 1,
            _ => row.number("cpus", 1, CPUS_MAX)?,
        },
        compute_us: row.duration_us("runtime")?,
        parents: after,
        shared_data: (!set.is_empty()).then(|| (set.to_owned(), shared_bytes)),
        input_bytes: row.size("input")?,
        output_bytes: row.size("output")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rejection_cases::assert_each_is_rejected;

    const CSV_TEXT: &str = "job,runtime,cpus,after,shared,shared-bytes,input,output\n\
        a1,62.5,1,,reference,40 GB,100 MB,2 GB\n\
        a2,60,1,,reference,30 GB,100 MB,2 GB\n\
        b,1 h,4,a1 a2,,,,30 MB\n";

    #[test]
    fn table_columns_become_shared_private_and_result_data() {
        let past = from_csv("jobs", CSV_TEXT).unwrap();
        let (workflow, measured) = (&past.workflow, &past.measured);
        let sizes: Vec<(&str, u64)> = workflow
            .volumes
            .iter()
            .map(|volume| (volume.name.as_str(), volume.size_bytes))
            .collect();
        let expected = [
            ("out.a1", 2_000_000_000),
            ("out.a2", 2_000_000_000),
            ("out.b", 30_000_000),
            ("reference", 40_000_000_000),
            ("in.a1", 100_000_000),
            ("in.a2", 100_000_000),
        ];
        assert_eq!(sizes, expected);
        assert_eq!(
            workflow.extracts.len(),
            1,
            "only what no job reads goes home"
        );
        assert_eq!(workflow.jobs[2].parents.len(), 2);
        assert_eq!(measured.jobs[0].compute_us, 62_500_000);
        let read: u64 = measured.jobs[2].mounts.iter().map(|m| m.read_bytes).sum();
        assert_eq!(read, 4_000_000_000);
    }

    #[test]
    fn errors_name_their_line() {
        let slips = r"
            runtime => time => line 1: unknown column 'time'
            a2,60 => a1,60 => line 3: job 'a1' is a duplicate of line 2
            a2,60 => ,60 => line 3: the job has no name
            a2,60 => a2,soon => line 3: runtime 'soon': expected a duration
            a2,60 => a2,-60 => line 3: runtime '-60'
            1 h,4 => 1 h,0 => line 4: cpus '0': must be a whole number from 1
            a1 a2 => a1 a3 => line 4: after 'a1 a3': unknown job 'a3'
            30 GB =>  => line 3: shared 'reference': `shared` (name of the data)
            30 MB => 30 megs => line 4: output '30 megs': unknown unit of size
            62.5,1,, => 62.5,1,b, => line 2: job 'a1' depends on itself
            4,a1 a2,,,,30 MB => 4,a1 a2 => line 4: has 4 cells
        ";
        assert_each_is_rejected(CSV_TEXT, slips, |text| from_csv("jobs", text));
        let empty = from_csv("jobs", "job,runtime\n").unwrap_err().to_string();
        assert!(empty.contains("no jobs"), "{empty}");
        for (text, expected) in [
            ("job,cpus\na,1\n", "line 1: the column 'runtime' is missing"),
            (
                "\n\njob,cpus\na,1\n",
                "line 3: the column 'runtime' is missing",
            ),
            ("\njob,runtime,x\n", "line 2: unknown column 'x'"),
        ] {
            let said = from_csv("jobs", text).unwrap_err().to_string();
            assert!(said.starts_with(expected), "{said}");
        }
    }
}
