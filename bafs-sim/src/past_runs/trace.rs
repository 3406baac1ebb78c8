//! Measured behaviour of each job of a workflow, from a table, instead of its declaration. It must
//! match the workflow: every job, and only volumes that the job mounts. Knows no environment.

use std::collections::BTreeMap;

use bafs_workflow::{Job, VolumeKind, Workflow};

use super::PastError;
use super::table::{Row, TableFormat, TextTable};
use crate::simulator::{JobLoad, MeasuredLoad, MountLoad};

const COLUMNS: [&str; 5] = ["job", "compute", "volume", "read", "written"];

/// Reads a trace of every job of a workflow from comma-separated values. A row gives the computing
/// time of a job, or its access to one of its volumes:
///
/// ```csv
/// job,compute,volume,read,written
/// align,62.5,,,
/// align,,genome,3 GB,
/// align,,work,,200 MB
/// ```
///
/// A volume without a row is not accessed. Numbers alone are seconds and bytes.
///
/// # Errors
/// With the line and the mismatch.
pub fn from_trace(workflow: &Workflow, text: &str) -> Result<MeasuredLoad, PastError> {
    let table = TextTable::parse(text, TableFormat::CommaSeparated)?;
    table.check_columns(&COLUMNS, &["job", "compute"])?;
    let jobs = workflow.jobs.iter().enumerate();
    let at: BTreeMap<&str, usize> = jobs.map(|(at, job)| (job.name.as_str(), at)).collect();
    let none = |job: &Job| JobLoad {
        compute_us: 0,
        mounts: vec![MountLoad::default(); job.mounts.len()],
    };
    let mut trace = Trace {
        workflow,
        loads: workflow.jobs.iter().map(none).collect(),
        row_lines: BTreeMap::new(),
    };
    for row in table.rows() {
        let name = row.text("job");
        let Some(job) = at.get(name) else {
            return Err(row.error("job", "the workflow has no job of this name"));
        };
        trace.add_row(&row, *job)?;
    }
    let untold = (0..workflow.jobs.len()).find(|job| !trace.row_lines.contains_key(&(*job, None)));
    if let Some(job) = untold {
        let name = &workflow.jobs[job].name;
        return Err(PastError::Unusable(format!(
            "no row gives the computing time of job '{name}'"
        )));
    }
    let written = trace.written_bytes();
    trace.check_reads(&written)?;
    let extract_bytes = trace.extract_bytes(&written);
    Ok(MeasuredLoad {
        jobs: trace.loads,
        extract_bytes,
        ..MeasuredLoad::default()
    })
}

struct Trace<'w> {
    workflow: &'w Workflow,
    loads: Vec<JobLoad>,
    /// The line of each job, and of each of its mounts.
    row_lines: BTreeMap<(usize, Option<usize>), usize>,
}

impl Trace<'_> {
    fn add_row(&mut self, row: &Row<'_>, job: usize) -> Result<(), PastError> {
        let (has_compute, volume) = (!row.text("compute").is_empty(), row.text("volume"));
        if has_compute != volume.is_empty() {
            let why = "a row describes computing or one volume: fill in either `compute` or \
                       `volume`";
            return Err(PastError::at_line(row.line, why));
        }
        let mount = match has_compute {
            true => None,
            false => Some(self.find_mount(row, job, volume)?),
        };
        if let Some(line) = self.row_lines.insert((job, mount), row.line) {
            let message = format!("duplicate of line {line}");
            return Err(PastError::at_line(row.line, message));
        }
        match mount {
            None => self.loads[job].compute_us = row.duration_us("compute")?,
            Some(at) => self.loads[job].mounts[at] = self.mount_load(row, job, at)?,
        }
        Ok(())
    }

    fn find_mount(&self, row: &Row<'_>, job: usize, volume: &str) -> Result<usize, PastError> {
        let job = &self.workflow.jobs[job];
        let mut mounts = job.mounts.iter();
        let found = mounts.position(|mount| self.workflow.volume(mount.volume).name == volume);
        let missing = || {
            row.error(
                "volume",
                format!("job '{}' does not mount this volume", job.name),
            )
        };
        found.ok_or_else(missing)
    }

    /// Bytes written to each volume, by all jobs together.
    fn written_bytes(&self) -> Vec<u64> {
        let mut written = vec![0_u64; self.workflow.volumes.len()];
        for (job, load) in self.workflow.jobs.iter().zip(&self.loads) {
            for (mount, load) in job.mounts.iter().zip(&load.mounts) {
                let sum = &mut written[mount.volume.as_usize()];
                *sum = sum.saturating_add(load.written_bytes);
            }
        }
        written
    }

    /// Rejects a job that reads more of a scratch volume than all jobs write. Each byte counts
    /// once, so no job reads more of a volume than its content.
    fn check_reads(&self, written: &[u64]) -> Result<(), PastError> {
        for (&(job, mount), &line) in &self.row_lines {
            let Some(at) = mount else { continue };
            let mounted = self.workflow.jobs[job].mounts[at].volume;
            let spec = self.workflow.volume(mounted);
            let read_bytes = self.loads[job].mounts[at].read_bytes;
            let there_bytes = written[mounted.as_usize()];
            let begins_empty = matches!(spec.kind, VolumeKind::Scratch { fill: None });
            if begins_empty && read_bytes > there_bytes {
                let (job, volume) = (&self.workflow.jobs[job].name, &spec.name);
                let message = format!(
                    "job '{job}' reads {read_bytes} bytes of volume '{volume}', but all jobs \
                     together write only {there_bytes}; count each byte once, also when a job \
                     rereads it"
                );
                return Err(PastError::at_line(line, message));
            }
        }
        Ok(())
    }

    /// Bytes of the files that go home: the bytes written to their volume, in equal parts, because
    /// no row describes files. Data filled from home may go back, and counts as declared.
    fn extract_bytes(&self, written: &[u64]) -> BTreeMap<u32, u64> {
        let extracts = &self.workflow.extracts;
        let mut files = vec![0_u64; self.workflow.volumes.len()];
        for extract in extracts {
            files[extract.volume.as_usize()] += 1;
        }
        let bytes = extracts.iter().enumerate().filter_map(|(at, extract)| {
            let volume = self.workflow.volume(extract.volume);
            if matches!(volume.kind, VolumeKind::Scratch { fill: Some(_) }) {
                return None;
            }
            // Overwritten bytes count once.
            let size_bytes = match volume.size_bytes {
                0 => u64::MAX,
                size_bytes => size_bytes,
            };
            let held_bytes = written[extract.volume.as_usize()].min(size_bytes);
            Some((at as u32, held_bytes / files[extract.volume.as_usize()]))
        });
        bytes.collect()
    }

    fn mount_load(&self, row: &Row<'_>, job: usize, at: usize) -> Result<MountLoad, PastError> {
        let mount = &self.workflow.jobs[job].mounts[at];
        let (read_bytes, written_bytes) = (row.size("read")?, row.size("written")?);
        if written_bytes > 0 && !mount.writable {
            let why = "the job mounts this volume read-only";
            return Err(row.error("written", why));
        }
        let size_bytes = self.workflow.volume(mount.volume).size_bytes;
        for (column, bytes) in [("read", read_bytes), ("written", written_bytes)] {
            if size_bytes > 0 && bytes > size_bytes {
                let why = format!("the volume has a size of only {size_bytes} bytes");
                return Err(row.error(column, why));
            }
        }
        Ok(MountLoad {
            read_bytes,
            written_bytes,
            is_bind_mount: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;
    use crate::rejection_cases::assert_each_is_rejected;

    const TRACE_TEXT: &str = "job,compute,volume,read,written\n\
        a,1.5,,,\na,,b,3 MB,\na,,w,,2000\nz,2,,,\nz,,w,2000,\n";

    fn traced_workflow() -> Workflow {
        let text = "volume b bafs://home/b 4 MB\nvolume w scratch 1 MB\njob a {\nexecutable = x\n}\n\
            job z {\nexecutable = x\n}\nparent a child z\nmount b a /b\nmount w a /w\n\
            mount w z /w ro\n";
        let parsed = parse_workflow("w.bafs", text, &|path| Err(path.to_owned()));
        parsed.unwrap().workflow
    }

    #[test]
    fn jobs_follow_their_trace_rows() {
        let measured = from_trace(&traced_workflow(), TRACE_TEXT).unwrap();
        let load = |read_bytes, written_bytes| MountLoad {
            read_bytes,
            written_bytes,
            is_bind_mount: false,
        };
        assert_eq!(measured.jobs[0].compute_us, 1_500_000);
        assert_eq!(
            measured.jobs[0].mounts,
            [load(3_000_000, 0), load(0, 2_000)]
        );
        assert_eq!(measured.jobs[1].mounts, [load(2_000, 0)]);
    }

    #[test]
    fn result_sizes_follow_the_trace() {
        let text = "volume v scratch 6 MB\nvolume q scratch 1 MB from bafs://home/q\n\
            job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\nparent a child b\n\
            mount v a /v\nmount v b /v\nmount q b /q\nextract v r bafs://home/r\n\
            extract v s bafs://home/s\nextract q t bafs://home/t\n";
        let parsed = parse_workflow("w.bafs", text, &|path| Err(path.to_owned()));
        let workflow = parsed.unwrap().workflow;
        let sent = |rows: &str| {
            let text = format!("job,compute,volume,read,written\na,1,,,\nb,1,,,\n{rows}");
            let sent = from_trace(&workflow, &text).unwrap().extract_bytes;
            sent.into_values().collect::<Vec<_>>()
        };
        assert_eq!(sent(""), [0, 0], "what was filled counts as declared");
        assert_eq!(sent("a,,v,,1 MB\nb,,v,,2000\n"), [501_000, 501_000]);
        assert_eq!(sent("a,,v,,6 MB\nb,,v,,6 MB\n"), [3_000_000, 3_000_000]);
    }

    #[test]
    fn mismatched_trace_is_rejected_with_its_line() {
        let slips = r"
            a,1.5 => c,1.5 => line 2: job 'c': the workflow has no job
            a,1.5 => a,fast => line 2: compute 'fast'
            a,,b => z,,b => line 3: volume 'b': job 'z' does not mount this
            3 MB => -3 MB => line 3: read '-3 MB'
            3 MB, => 3 MB,1 => line 3: written '1': the job mounts this volume read-
            ,2000\nz => ,2 MB\nz => line 4: written '2 MB': the volume has a size of only 1000000
            ,2000\nz => ,1999\nz => line 6: job 'z' reads 2000 bytes of volume 'w', but all
            a,,w,,2000\n =>  => line 5: job 'z' reads 2000 bytes of volume 'w', but all
            3 MB => 99999999999 => line 3: read '99999999999': the volume has a size of only 4000000
            ,w,2000, => ,w,1.1 MB, => line 6: read '1.1 MB': the volume has a size of only
            a,,w => a,,b => line 4: duplicate of line 3
            a,,w => a,1,w => line 4: a row describes computing or one volume
            z,2,,,\n =>  => no row gives the computing time of job 'z'
            read => reads => line 1: unknown column 'reads'
            compute => cpu => line 1: unknown column 'cpu'
        ";
        assert_each_is_rejected(TRACE_TEXT, slips, |text| {
            from_trace(&traced_workflow(), text)
        });
    }
}
