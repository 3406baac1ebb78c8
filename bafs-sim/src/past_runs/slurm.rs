//! Past jobs from Slurm's accounting, as `sacct --parsable2` prints it. Asks no Slurm.
//!
//! Slurm records how long jobs ran and how many bytes their tasks read and wrote. It records
//! neither the files, nor which job reads another's output. So jobs have no order here, and all
//! output of a job is a result. The user gives the share of the input that jobs of one name have in
//! common.

use std::collections::BTreeMap;

use bafs_workflow::RUNTIME_S_MAX;

use super::csv::CPUS_MAX;
use super::table::{Row, TableFormat, TextTable};
use super::workload::{PastJob, build_workload};
use super::{JOBS_MAX, PastError, PastRun};

/// The command that prints the needed columns.
const SACCT_COMMAND: &str = "sacct --parsable2 --format=JobID,JobName,State,AllocCPUS,Elapsed,\
                       TotalCPU,Start,End,NTasks,AveDiskRead,AveDiskWrite";

/// Columns with the run time of a job; one of them is required.
const ELAPSED_COLUMNS: [&str; 2] = ["ElapsedRaw", "Elapsed"];
/// Columns with the number of processors of a job; one of them is required.
const CPU_COLUMNS: [&str; 3] = ["AllocCPUS", "NCPUS", "ReqCPUS"];

/// Reads past jobs from the accounting. `shared_permille` thousandths of the input of jobs of one
/// name count as the same data.
///
/// # Errors
/// With the line and the expected content.
pub fn from_slurm(name: &str, text: &str, shared_permille: u32) -> Result<PastRun, PastError> {
    let table = TextTable::parse(text, TableFormat::BarSeparated)?;
    let column_of = |columns: &[&'static str]| {
        let found = columns.iter().find(|column| table.has_column(column));
        let missing = || {
            let columns = columns.join(" or ");
            table.header_error(format!("no column {columns}; use `{SACCT_COMMAND}`"))
        };
        found.copied().ok_or_else(missing)
    };
    let columns = SlurmColumns {
        id: column_of(&["JobID"])?,
        state: column_of(&["State"])?,
        elapsed: column_of(&ELAPSED_COLUMNS)?,
        cpus: column_of(&CPU_COLUMNS)?,
    };
    let mut accounting = Accounting::default();
    for row in table.rows() {
        accounting.add_row(&row, columns)?;
    }
    accounting.into_past_run(name, shared_permille)
}

#[derive(Debug, Clone, Copy)]
struct SlurmColumns {
    id: &'static str,
    state: &'static str,
    elapsed: &'static str,
    cpus: &'static str,
}

/// A job that was completed.
#[derive(Debug)]
struct CompletedJob {
    line: usize,
    name: String,
    cpus: u32,
    elapsed_us: u64,
    cpu_us: Option<u64>,
    /// From its own row: some sites print the sums there, as well as in the rows of its steps.
    own_bytes: TransferredBytes,
    step_bytes: TransferredBytes,
}

/// Bytes that were read and written.
#[derive(Debug, Clone, Copy, Default)]
struct TransferredBytes {
    read_bytes: u64,
    written_bytes: u64,
}

impl TransferredBytes {
    fn from_row(row: &Row<'_>) -> Result<Self, PastError> {
        Ok(Self {
            read_bytes: total_task_bytes(row, "Read")?,
            written_bytes: total_task_bytes(row, "Write")?,
        })
    }

    fn plus(self, other: Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_add(other.read_bytes),
            written_bytes: self.written_bytes.saturating_add(other.written_bytes),
        }
    }
}

impl CompletedJob {
    fn transferred(&self) -> TransferredBytes {
        TransferredBytes {
            read_bytes: self.own_bytes.read_bytes.max(self.step_bytes.read_bytes),
            written_bytes: self
                .own_bytes
                .written_bytes
                .max(self.step_bytes.written_bytes),
        }
    }

    fn has_transfers(&self) -> bool {
        let moved = self.transferred();
        moved.read_bytes > 0 || moved.written_bytes > 0
    }
}

#[derive(Debug, Default)]
struct Accounting {
    jobs: Vec<(String, CompletedJob)>,
    job_positions: BTreeMap<String, usize>,
    /// Jobs that were not completed, by their state.
    other_states: BTreeMap<String, u64>,
    start_s: Option<i64>,
    end_s: Option<i64>,
}

impl Accounting {
    fn add_row(&mut self, row: &Row<'_>, columns: SlurmColumns) -> Result<(), PastError> {
        let id = row.text(columns.id);
        if id.is_empty() {
            return Err(PastError::at_line(row.line, "the JobID is empty"));
        }
        // `1234.batch` and `1234.0` are steps of `1234`: only they have the bytes that tasks read.
        let (job, is_step) = match id.split_once('.') {
            Some((job, _)) => (job, true),
            None => (id, false),
        };
        if is_step {
            let moved = TransferredBytes::from_row(row)?;
            if let Some(&at) = self.job_positions.get(job) {
                let job = &mut self.jobs[at].1;
                job.step_bytes = job.step_bytes.plus(moved);
            }
            return Ok(());
        }
        let state = row.text(columns.state).split_whitespace().next();
        let state = state.ok_or_else(|| row.error(columns.state, "the state is empty"))?;
        if state != "COMPLETED" {
            *self.other_states.entry(state.to_owned()).or_default() += 1;
            return Ok(());
        }
        if let Some(&earlier) = self.job_positions.get(job) {
            let line = self.jobs[earlier].1.line;
            let why = format!("is a duplicate of line {line}");
            return Err(row.error(columns.id, why));
        }
        if self.jobs.len() == JOBS_MAX {
            let message = format!("is job {}; the limit is {JOBS_MAX}", JOBS_MAX + 1);
            return Err(PastError::at_line(row.line, message));
        }
        self.note_times(row)?;
        let completed = CompletedJob {
            line: row.line,
            name: row.text("JobName").to_owned(),
            cpus: row.number(columns.cpus, 1, CPUS_MAX)?,
            elapsed_us: parse_wall_us(row, columns.elapsed)?,
            cpu_us: match row.text("TotalCPU") {
                "" => None,
                _ => Some(parse_elapsed_us(row, "TotalCPU")?),
            },
            own_bytes: TransferredBytes::from_row(row)?,
            step_bytes: TransferredBytes::default(),
        };
        self.job_positions.insert(job.to_owned(), self.jobs.len());
        self.jobs.push((job.to_owned(), completed));
        Ok(())
    }

    fn note_times(&mut self, row: &Row<'_>) -> Result<(), PastError> {
        let start = parse_time_s(row, "Start")?;
        let end = parse_time_s(row, "End")?;
        if let (Some(start), Some(end)) = (start, end)
            && end < start
        {
            return Err(row.error("End", "the job ended before it started"));
        }
        self.start_s = self.start_s.into_iter().chain(start).min();
        self.end_s = self.end_s.into_iter().chain(end).max();
        Ok(())
    }

    fn into_past_run(self, name: &str, shared_permille: u32) -> Result<PastRun, PastError> {
        if self.jobs.is_empty() {
            let message = match self.other_states.is_empty() {
                true => "the file has no jobs below the header",
                false => "no job is COMPLETED, so there is nothing to simulate",
            };
            return Err(PastError::Unusable(message.to_owned()));
        }
        let mut remarks = Vec::new();
        for (state, count) in &self.other_states {
            remarks.push(format!("{count} jobs in state {state} are left out"));
        }
        if !self.jobs.iter().any(|(_, job)| job.has_transfers()) {
            let what = "AveDiskRead and AveDiskWrite are missing or 0 for all jobs";
            remarks.push(format!("{what}, so the simulation covers processors only"));
        }
        let jobs = self.jobs.into_iter();
        let jobs = jobs.map(|(id, job)| to_past_job(id, job, shared_permille));
        let jobs: Vec<PastJob> = jobs.collect();
        let (workflow, measured) = build_workload(name, &jobs)?;
        let took_s = self.start_s.zip(self.end_s);
        Ok(PastRun {
            workflow,
            measured,
            duration_s: took_s.map(|(start, end)| (end - start) as f64),
            began_at: None,
            site: None,
            job_lines: jobs.iter().map(|job| job.line).collect(),
            remarks,
        })
    }
}

fn to_past_job(id: String, job: CompletedJob, shared_permille: u32) -> PastJob {
    let moved = job.transferred();
    // The rest of its time was waiting, for data among others, which is simulated. A job of several
    // processors may have used more than its time.
    let compute_us = match job.cpu_us.filter(|_| job.has_transfers()) {
        Some(cpu_us) => cpu_us.min(job.elapsed_us),
        None => job.elapsed_us,
    };
    let shared = u128::from(moved.read_bytes) * u128::from(shared_permille) / 1_000;
    let shared = u64::try_from(shared).unwrap_or(u64::MAX);
    PastJob {
        line: job.line,
        name: id,
        cpus: job.cpus,
        compute_us,
        parents: Vec::new(),
        shared_data: (shared > 0).then(|| (format!("shared.{}", job.name), shared)),
        input_bytes: moved.read_bytes - shared,
        output_bytes: moved.written_bytes,
    }
}

/// Bytes that all tasks of a step read or wrote: the mean of a task times their number, else the
/// maximum of a task.
fn total_task_bytes(row: &Row<'_>, what: &str) -> Result<u64, PastError> {
    let (mean, most) = (format!("AveDisk{what}"), format!("MaxDisk{what}"));
    if !row.text(&mean).is_empty() {
        let tasks = match row.text("NTasks") {
            "" => 1,
            _ => row.number("NTasks", 0, u32::MAX)?,
        };
        return Ok(parse_amount(row, &mean)?.saturating_mul(u64::from(tasks)));
    }
    parse_amount(row, &most)
}

/// An amount in Slurm's format: `12.50M`, in powers of 1024; an empty cell is 0.
fn parse_amount(row: &Row<'_>, column: &str) -> Result<u64, PastError> {
    const SLURM_UNITS: [(char, u64); 5] = [
        ('K', 1 << 10),
        ('M', 1 << 20),
        ('G', 1 << 30),
        ('T', 1 << 40),
        ('P', 1 << 50),
    ];
    let text = row.text(column);
    if text.is_empty() {
        return Ok(0);
    }
    let unit = SLURM_UNITS
        .iter()
        .find(|(letter, _)| text.ends_with(*letter));
    let (number, unit) = match unit {
        Some((letter, unit)) => (text.trim_end_matches(*letter), *unit),
        None => (text, 1),
    };
    let is_plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let value: Option<f64> = number.parse().ok().filter(|_| is_plain);
    // 1000 PB, the most that a volume may have.
    let value = value
        .map(|value| value * unit as f64)
        .filter(|v| *v <= 1e18);
    let wrong = || row.error(column, "must be an amount such as 12.50M or 4096");
    Ok(value.ok_or_else(wrong)?.round() as u64)
}

/// How long a job ran, in microseconds.
fn parse_wall_us(row: &Row<'_>, column: &str) -> Result<u64, PastError> {
    let us = parse_elapsed_us(row, column)?;
    if us > RUNTIME_S_MAX * 1_000_000 {
        return Err(row.error(column, "must be at most ten years"));
    }
    Ok(us)
}

/// A time as Slurm writes it, `[D-][HH:]MM:SS[.mmm]`, or whole seconds in `ElapsedRaw`.
fn parse_elapsed_us(row: &Row<'_>, column: &str) -> Result<u64, PastError> {
    let text = row.text(column);
    let wrong = || match column {
        "ElapsedRaw" => row.error(column, "must be seconds, such as 3600"),
        _ => row.error(column, "must be a time such as 1-02:30:00 or 05:12.250"),
    };
    let number = |text: &str| {
        let is_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>()
            .ok()
            .filter(|n| is_digits && *n < 1 << 32)
    };
    if column == "ElapsedRaw" {
        return Ok(number(text).ok_or_else(wrong)? * 1_000_000);
    }
    let (days, rest) = match text.split_once('-') {
        Some((days, rest)) => (number(days).ok_or_else(wrong)?, rest),
        None => (0, text),
    };
    let (clock, micros) = match rest.split_once('.') {
        Some((clock, part)) if part.len() <= 6 => {
            let micros = number(&format!("{part:0<6}")).ok_or_else(wrong)?;
            (clock, micros)
        }
        Some(_) => return Err(wrong()),
        None => (rest, 0),
    };
    let parts = clock.split(':').map(number).collect::<Option<Vec<u64>>>();
    let seconds = match parts.ok_or_else(wrong)?[..] {
        [hours, minutes, seconds] if minutes < 60 && seconds < 60 => {
            hours * 3_600 + minutes * 60 + seconds
        }
        [minutes, seconds] if seconds < 60 && days == 0 => minutes * 60 + seconds,
        _ => return Err(wrong()),
    };
    let us = (days * 86_400 + seconds).checked_mul(1_000_000);
    us.and_then(|us| us.checked_add(micros)).ok_or_else(wrong)
}

/// A point in time in Slurm's format, `2026-03-01T12:00:00`, in seconds; `None` for `Unknown`,
/// `None` and an empty cell.
fn parse_time_s(row: &Row<'_>, column: &str) -> Result<Option<i64>, PastError> {
    let text = row.text(column);
    if matches!(text, "" | "Unknown" | "None") {
        return Ok(None);
    }
    let wrong = || row.error(column, "must be a time such as 2026-03-01T12:00:00");
    let parts: Vec<&str> = text.split(['-', 'T', ':']).collect();
    let parts = parts.iter().map(|part| part.parse::<u32>().ok());
    let parts = parts.collect::<Option<Vec<u32>>>().ok_or_else(wrong)?;
    let [
        year,
        month @ 1..=12,
        day @ 1..=31,
        hour @ 0..=23,
        minute @ 0..=59,
        second @ 0..=60,
    ] = parts[..]
    else {
        return Err(wrong());
    };
    // Days since 1970 by H. Hinnant's algorithm: years begin in March.
    let year = i64::from(year) - i64::from(month <= 2);
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let month = i64::from((month + 9) % 12);
    let of_year = (153 * month + 2) / 5 + i64::from(day) - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    let clock = hour * 3_600 + minute * 60 + second;
    Ok(Some(days * 86_400 + i64::from(clock)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rejection_cases::assert_each_is_rejected;

    /// As Slurm 22.05 prints an array of which one job failed, and one that still runs.
    const SACCT: &str = "\
JobID|JobName|State|AllocCPUS|Elapsed|TotalCPU|Start|End|NTasks|AveDiskRead|AveDiskWrite
4711_1|align|COMPLETED|4|01:10:00|04:00:00|2026-02-28T23:50:00|2026-03-01T01:00:00|||
4711_1.batch|batch|COMPLETED|4|01:10:00|04:00:00|2026-02-28T23:50:00|Unknown|1|2.50G|100M
4711_1.extern|extern|COMPLETED|4|01:10:00|00:00.001|2026-02-28T23:50:00|Unknown|1|0.00M|0
4711_2|align|COMPLETED|4|1-00:00:30|12:30.500|2026-03-01T00:00:00|2026-03-02T00:00:30|||
4711_2.0|prog|COMPLETED|4|1-00:00:30|12:30.500|2026-03-01T00:00:00|2026-03-02T00:00:30|2|1G|512K
4711_3|align|FAILED|4|00:00:10|00:01.000|2026-03-01T00:00:00|2026-03-01T00:00:10|||
4712|merge|CANCELLED by 1000|1|00:00:00|00:00:00|Unknown|Unknown|||
4713|merge|RUNNING|1|00:10:00|00:00:00|2026-03-01T00:00:00|Unknown|||
";

    #[test]
    fn completed_jobs_include_their_steps() {
        let past = from_slurm("jobs", SACCT, 800).unwrap();
        assert_eq!(past.workflow.jobs.len(), 2);
        assert_eq!(past.duration_s, Some(86_400.0 + 630.0));
        let [first, second] = &past.measured.jobs[..] else {
            panic!("two jobs");
        };
        // Four processors for an hour: all of its time may have been computing.
        assert_eq!(first.compute_us, 4_200_000_000);
        assert_eq!(second.compute_us, 750_500_000);
        let read = |job: &crate::simulator::JobLoad| -> u64 {
            job.mounts.iter().map(|m| m.read_bytes).sum()
        };
        assert_eq!(read(first), 5 << 29);
        assert_eq!(read(second), 2 << 30);
        let shared = past
            .workflow
            .volumes
            .iter()
            .find(|v| v.name == "shared.align");
        assert_eq!(
            shared.unwrap().size_bytes,
            4 << 29,
            "four fifths of 2.5 GiB"
        );
        assert_eq!(past.workflow.jobs[0].cpus, 4);
        let expected = [
            "1 jobs in state CANCELLED are left out",
            "1 jobs in state FAILED are left out",
            "1 jobs in state RUNNING are left out",
        ];
        assert_eq!(past.remarks, expected);
    }

    #[test]
    fn job_row_totals_do_not_count_twice() {
        let summed = SACCT.replace("2026-03-01T01:00:00|||", "2026-03-01T01:00:00|1|2.50G|100M");
        assert_ne!(summed, SACCT);
        let measured = |text| from_slurm("jobs", text, 800).unwrap().measured;
        assert_eq!(measured(&summed), measured(SACCT));
    }

    #[test]
    fn trailing_bars_and_raw_seconds_are_understood() {
        let text = "JobID|State|NCPUS|ElapsedRaw|\n1|COMPLETED|1|90|\n";
        let past = from_slurm("jobs", text, 0).unwrap();
        assert_eq!(past.measured.jobs[0].compute_us, 90_000_000);
        assert!(
            past.remarks[0].contains("missing or 0 for all jobs"),
            "{past:?}"
        );
    }

    #[test]
    fn errors_name_their_line() {
        let slips = r"
            |Elapsed| => |Time| => line 1: no column ElapsedRaw or Elapsed; use `sacct
            JobID| => Job| => line 1: no column JobID
            |4|01:10:00|04 => |0|01:10:00|04 => line 2: AllocCPUS '0': must be
            |4|01:10:00|04 => |4|01:70:00|04 => line 2: Elapsed '01:70:00': must be a time
            |4|01:10:00|04 => |4|INVALID|04 => line 2: Elapsed 'INVALID'
            |4|01:10:00|04 => |4|400000000-00:00:30|04 => line 2: Elapsed '400000000-00:00:30': must
            |4|01:10:00|04 => |4|4000-00:00:00|04 => line 2: Elapsed => must be at most ten years
            |01:10:00|04:00:00| => |01:10:00|400000000-00:00:30| => line 2: TotalCPU => must be
            2.50G => 2.50Q => line 3: AveDiskRead '2.50Q': must be an amount
            2.50G => -2.50G => line 3: AveDiskRead '-2.50G'
            |1|2.50G => |one|2.50G => line 3: NTasks 'one'
            4711_2| => 4711_1| => line 5: JobID '4711_1': is a duplicate of line 2
            2026-03-01T01:00:00||| => 2026-13-01T01:00:00||| => line 2: End '2026-13
            2026-03-01T01:00:00||| => 2026-01-01T01:00:00||| => line 2: End => the job ended before
            4711_1|align => 4711_1|al|ign => line 2: has
        ";
        assert_each_is_rejected(SACCT, slips, |text| from_slurm("jobs", text, 0));
        let head = SACCT.lines().next().unwrap();
        let none = from_slurm("jobs", head, 0).unwrap_err().to_string();
        assert!(none.contains("no jobs below the header"), "{none}");
        let failed: String = SACCT.replace("COMPLETED", "FAILED");
        let none = from_slurm("jobs", &failed, 0).unwrap_err().to_string();
        assert!(none.contains("no job is COMPLETED"), "{none}");
    }
}
