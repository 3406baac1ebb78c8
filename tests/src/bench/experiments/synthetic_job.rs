//! A program with the file accesses of a measured one: so many bytes, in such blocks, sequential or
//! random, in place. Computing is sleeping, so the processors of one machine can act as those of
//! many.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bafs_sim::seeded_rng::SeededRng;

/// First argument of the process.
pub(crate) const JOB_PROCESS: &str = "synthetic-job";

/// One thing that a job does, as text: `read:PATH:BYTES`, `random:PATH:BYTES`,
/// `write:PATH:BYTES:UNIQUE`, `compute:MS`.
fn run_step(text: &str) -> Result<()> {
    let parts: Vec<&str> = text.split(':').collect();
    match parts.as_slice() {
        ["compute", ms] => {
            std::thread::sleep(Duration::from_millis(ms.parse()?));
            Ok(())
        }
        ["read", path, bytes] => read_file(path, bytes.parse()?, None),
        ["random", path, bytes] => read_file(
            path,
            bytes.parse()?,
            Some(SeededRng::new(path.len() as u64)),
        ),
        ["write", path, bytes, unique] => write_file(path, bytes.parse()?, unique.parse()?),
        _ => bail!("a job cannot do '{text}'"),
    }
}

/// Does one step after the other.
///
/// # Errors
/// A step that cannot be read or done.
pub(crate) fn run_job_process(steps: &[String]) -> Result<()> {
    steps
        .iter()
        .try_for_each(|text| run_step(text).with_context(|| format!("step {text}")))
}

/// Bytes of one read or write.
const BLOCK_BYTES: usize = 64 << 10;

fn read_file(path: &str, bytes: u64, mut random: Option<SeededRng>) -> Result<()> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    ensure!(size > 0 || bytes == 0, "{path} is empty");
    let mut block = vec![0; BLOCK_BYTES];
    let (mut left, mut at) = (bytes, 0);
    while left > 0 {
        let length = left.min(BLOCK_BYTES as u64).min(size - at);
        let offset = match &mut random {
            Some(rng) => rng.next_below((size - length).max(1)),
            None => at,
        };
        file.read_exact_at(&mut block[..length as usize], offset)?;
        left -= length;
        at = (at + length) % size;
    }
    Ok(())
}

/// Writes over the same bytes again when there are more to write than are to be kept.
fn write_file(path: &str, bytes: u64, unique: u64) -> Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    ensure!(
        unique > 0 || bytes == 0,
        "nothing can be written in no space"
    );
    let block: Vec<u8> = (0..BLOCK_BYTES).map(|at| (at % 251) as u8).collect();
    let (mut left, mut at) = (bytes, 0);
    while left > 0 {
        let length = left.min(BLOCK_BYTES as u64).min(unique - at);
        file.write_all_at(&block[..length as usize], at)?;
        left -= length;
        at = (at + length) % unique;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_program_writes_in_place_and_rereads() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("data");
        let path = path.display();
        let steps = [
            format!("write:{path}:300000:100000"),
            format!("read:{path}:250000"),
            format!("random:{path}:250000"),
            "compute:1".to_owned(),
        ];
        run_job_process(&steps).expect("it does all");
        let written = std::fs::metadata(path.to_string()).expect("a file").len();
        assert_eq!(written, 100_000);
        assert!(run_step("read:/no/such:1").is_err());
        assert!(run_step("dance").is_err());
    }
}
