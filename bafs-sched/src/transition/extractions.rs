//! Files on their way home: when each is sent, and what follows from its success or failure. What a
//! failure means says `policy/failure/extraction_failures.rs`.

use bafs_proto::file_set::FileSelection;
use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::{Error, ErrorCode};
use bafs_workflow::{Extract, JobIndex, VolumeIndex};

use crate::action::{Action, MountedVolume};
use crate::decision::Decision;
use crate::describe::describe_ms;
use crate::policy::View;
use crate::policy::failure::attribution::is_last_own_fault;
use crate::policy::failure::extraction_failures::{self, ExtractionVerdict, judge_extraction};
use crate::state::extractions::{ExtractionState, Failing, UnsentResult};
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

impl State {
    /// A job has waited so long for a home: of the first that waits for more than a moment somebody
    /// is told, as of results.
    pub(crate) fn tell_of_home(&mut self, job: JobIndex, waited_ms: u64, fault: &str) {
        if !extraction_failures::is_home_absence_told(View::new(self), waited_ms) {
            return;
        }
        self.extractions.told.insert(ErrorCode::HomeUnreachable);
        let (name, time) = (
            &self.graph.workflow.job(job).name,
            describe_ms(self.settings.extract_timeout_ms),
        );
        let text = format!(
            "job '{name}' waits for a home that does not answer: {fault}; start the home; the \
             scheduler retries for {time}"
        );
        self.tell(RunWarning {
            job: Some(job),
            volume: None,
            node: None,
            text,
        });
    }

    /// Sends the files of a volume home if its last writer is done.
    pub(crate) fn send_files(&mut self, volume: VolumeIndex) {
        let node = self.graph.volume(volume);
        if node.writers_left > 0 || node.extracts_left == 0 {
            return;
        }
        for index in node.extracts.clone() {
            if self.extractions.stages[index as usize] == ExtractionState::Waiting {
                self.send(index, volume);
            }
        }
    }

    fn send(&mut self, index: u32, volume: VolumeIndex) {
        let Some((id, server)) = self.volumes.scratch(volume) else {
            return;
        };
        if self
            .volumes
            .get(id)
            .is_none_or(|instance| instance.state != InstanceState::Ready)
        {
            return;
        }
        let extract = ExtractionId(self.next_id());
        self.extractions.stages[index as usize] = ExtractionState::Sending(extract, id);
        self.extractions.asked[index as usize] = self.now;
        self.extractions.by_id.insert(extract, index);
        let source = MountedVolume { volume, id, server };
        self.out.push(Action::ExtractFile {
            extract,
            index,
            source,
        });
    }

    pub(crate) fn send_again(&mut self, index: u32) {
        let ExtractionState::Paused(extract, id) = self.extractions.stages[index as usize] else {
            return self.send_log_again(index);
        };
        self.extractions.stages[index as usize] = ExtractionState::Sending(extract, id);
        self.extractions.asked[index as usize] = self.now;
        let Some(instance) = self.volumes.get(id) else {
            return;
        };
        let source = MountedVolume {
            volume: instance.volume,
            id,
            server: instance.server,
        };
        self.out.push(Action::ExtractFile {
            extract,
            index,
            source,
        });
    }

    pub(crate) fn file_extracted(&mut self, extract: ExtractionId, bytes: u64) {
        if self.log_sent(extract) {
            return;
        }
        let Some(index) = self.extractions.by_id.remove(&extract) else {
            return;
        };
        self.extractions.failing.remove(&index);
        self.extractions.bytes += bytes;
        self.extractions.done += 1;
        self.close_extract(index, ExtractionState::Done);
    }

    /// A job has run again. Its results at home are of the execution before, beside which those of
    /// this one may not be: they are sent again.
    pub(crate) fn reopen_extracts(&mut self, job: JobIndex) {
        for (volume, _) in self.graph.mounted(job).into_iter().filter(|(_, w)| *w) {
            for index in self.graph.volume(volume).extracts.clone() {
                let stage = &mut self.extractions.stages[index as usize];
                if *stage == ExtractionState::Done {
                    *stage = ExtractionState::Waiting;
                    self.extractions.done -= 1;
                    self.graph.reopen_extract(volume);
                }
            }
        }
    }

    /// A file is at home since an earlier run.
    pub(crate) fn skip_extract(&mut self, index: u32) {
        if self.extractions.is_waiting(index) {
            self.extractions.done += 1;
            self.close_extract(index, ExtractionState::Done);
        }
    }

    pub(crate) fn extract_failed(&mut self, extract: ExtractionId, error: &Error) {
        if self.log_failed(extract, error) {
            return;
        }
        let Some(&index) = self.extractions.by_id.get(&extract) else {
            return;
        };
        let ExtractionState::Sending(_, id) = self.extractions.stages[index as usize] else {
            return;
        };
        if error.code == ErrorCode::NotFound {
            self.extractions.by_id.remove(&extract);
            self.extractions.stages[index as usize] = ExtractionState::Waiting;
            self.not_written(index, error);
            return;
        }
        self.extractions.faults[index as usize] += 1;
        let waited_ms = self.count_failing(index, error);
        self.tell_refusal(index, error, waited_ms);
        let verdict = judge_extraction(View::new(self), index, error, waited_ms);
        let ExtractionVerdict::Retry(pause_ms) = verdict else {
            return self.keep(index, id);
        };
        let extract = match error.code {
            ErrorCode::UploadFenced => self.renew_extraction(index, extract),
            _ => extract,
        };
        self.extractions.stages[index as usize] = ExtractionState::Paused(extract, id);
        self.timers
            .set(self.now.plus_ms(pause_ms), Timer::Extract(index));
        if let Some(server) = self.volumes.get(id).and_then(|instance| instance.server) {
            self.out.push(Action::ProbeVolumes {
                server,
                volumes: vec![id],
            });
        }
    }

    /// Another run put something at the target meanwhile: the upload begins anew, as a later one.
    /// What it sent before may be replaced by now, so it does not count.
    fn renew_extraction(&mut self, index: u32, former: ExtractionId) -> ExtractionId {
        let extract = ExtractionId(self.next_id());
        self.extractions.by_id.remove(&former);
        self.extractions.by_id.insert(extract, index);
        extract
    }

    /// Notes that a file did not get home; for how long it has not, in milliseconds.
    fn count_failing(&mut self, index: u32, error: &Error) -> u64 {
        let since = extraction_failures::failing_since(View::new(self), index, error);
        let error = error.clone();
        let failing = Failing { since, error };
        self.extractions.failing.insert(index, failing);
        self.now.ms_since(since)
    }

    /// Names a file that could not be sent for so long, if the user is to know.
    fn tell_refusal(&mut self, index: u32, error: &Error, waited_ms: u64) {
        if !extraction_failures::is_refusal_told(View::new(self), error, waited_ms) {
            return;
        }
        self.extractions.told.insert(error.code);
        let spec = &self.graph.workflow.extracts[index as usize];
        let volume = &self.graph.workflow.volume(spec.volume).name;
        let (noun, path, target) = (spec.noun(), &spec.path, &spec.target);
        let next = match extraction_failures::is_hopeless(error) {
            true => "the scheduler does not retry it".to_owned(),
            false if error.code == ErrorCode::UploadFenced => {
                "another run may write there; the scheduler sends it again".to_owned()
            }
            false => {
                let time = describe_ms(self.settings.extract_timeout_ms);
                format!("correct that; the scheduler retries it for {time}")
            }
        };
        let text = format!(
            "{noun} '{path}' of volume '{volume}' cannot be sent to {target}: {error}; {next}"
        );
        let volume = Some(spec.volume);
        self.tell(RunWarning {
            job: None,
            volume,
            node: None,
            text,
        });
    }

    /// Gives up sending a file that is finished: its volume outlives the run, and the user is told
    /// how to fetch it.
    fn keep(&mut self, index: u32, id: VolumeId) {
        if let ExtractionState::Sending(extract, _) | ExtractionState::Paused(extract, _) =
            self.extractions.stages[index as usize]
        {
            self.extractions.by_id.remove(&extract);
        }
        self.extractions.stages[index as usize] = ExtractionState::Kept(id);
        self.extractions.failed += 1;
        let spec = &self.graph.workflow.extracts[index as usize];
        let failing = self.extractions.failing.get(&index);
        let is_of_file = failing.is_some_and(|it| it.error.code == ErrorCode::BadPath);
        let failure = self.describe_unsent(index);
        let instance = self.volumes.get_mut(id);
        let server = instance.and_then(|instance| {
            instance.is_kept = true;
            instance.server
        });
        let stays = match server {
            Some(server) => {
                let (node, kept_ms) = (self.fleet.name(server), self.settings.result_lifetime_ms);
                let fetch = match is_of_file {
                    // Nor would that command send it.
                    true => format!(" in volume {id}"),
                    false => format!(
                        "; correct the cause, then run: bafs volume extract {id} {}",
                        extract_words(spec)
                    ),
                };
                let kept = describe_ms(kept_ms);
                format!("it stays on node {node} for {kept} after the run{fetch}")
            }
            None => format!("it stays at home in .bafs-remote/{}/{id}", self.run),
        };
        let text = format!("{failure}; {stays}");
        let warning = RunWarning {
            job: None,
            volume: Some(spec.volume),
            node: server,
            text,
        };
        self.extractions.given_up.insert(index, warning);
    }

    /// What failed of a result that could not be sent.
    fn describe_unsent(&self, index: u32) -> String {
        let spec = &self.graph.workflow.extracts[index as usize];
        let name = &self.graph.workflow.volume(spec.volume).name;
        let (path, target) = (&spec.path, &spec.target);
        let failing = self.extractions.failing.get(&index);
        let error = failing.map_or_else(String::new, |failing| failing.error.to_string());
        let noun = spec.noun();
        format!("{noun} '{path}' of volume '{name}' failed to reach {target}: {error}")
    }

    /// Results that could not be sent, in the order of the workflow.
    pub fn unsent_results(&self) -> Vec<UnsentResult> {
        let given_up = self.extractions.given_up.iter();
        let results = given_up.map(|(index, warning)| {
            let stage = self.extractions.stages.get(*index as usize);
            let volume = match stage {
                Some(ExtractionState::Kept(id)) => Some(*id),
                _ => None,
            };
            let node = warning
                .node
                .map(|server| self.fleet.name(server).to_owned());
            UnsentResult {
                message: warning.text.clone(),
                failure: self.describe_unsent(*index),
                place: node.zip(volume),
            }
        });
        results.collect()
    }

    /// The run ends: results that could not be sent so far stay where they are.
    pub(crate) fn keep_unsent(&mut self) {
        for (index, id) in extraction_failures::find_unsent(View::new(self)) {
            let since = self.now;
            let error = Error::new(
                ErrorCode::HomeUnreachable,
                "the run ended before it arrived",
            );
            let failing = self.extractions.failing.entry(index);
            failing.or_insert(Failing { since, error });
            self.keep(index, id);
        }
    }

    /// The volume of these extractions is gone: they start afresh when it is written again.
    pub(crate) fn take_back_extracts(&mut self, volume: VolumeIndex, id: VolumeId) {
        for index in self.graph.volume(volume).extracts.clone() {
            let stage = &mut self.extractions.stages[index as usize];
            match *stage {
                ExtractionState::Sending(extract, of) | ExtractionState::Paused(extract, of)
                    if of == id =>
                {
                    *stage = ExtractionState::Waiting;
                    self.extractions.by_id.remove(&extract);
                }
                ExtractionState::Kept(of) if of == id => {
                    *stage = ExtractionState::Waiting;
                    self.extractions.failed -= 1;
                    // At the end of the run nobody makes the volume again.
                    if self.phase != Phase::Finishing {
                        self.extractions.given_up.remove(&index);
                    }
                }
                _ => {}
            }
        }
    }

    /// Gives up the extracts of a volume that a dead job should have written.
    pub(crate) fn give_up_extracts(&mut self, volume: VolumeIndex) {
        if self.graph.volume(volume).writers_dead == 0 {
            return;
        }
        for index in self.graph.volume(volume).extracts.clone() {
            match self.extractions.stages[index as usize] {
                ExtractionState::Done | ExtractionState::Failed | ExtractionState::Kept(_) => {
                    continue;
                }
                ExtractionState::Sending(extract, _) | ExtractionState::Paused(extract, _) => {
                    self.extractions.by_id.remove(&extract);
                }
                ExtractionState::Waiting => {}
            }
            self.extractions.failed += 1;
            self.close_extract(index, ExtractionState::Failed);
        }
    }

    /// The last writer finished without writing what was to be extracted: its fault. Of a set with
    /// several parts the error names the part that is missing.
    fn not_written(&mut self, index: u32, error: &Error) {
        let Some(job) = extraction_failures::find_negligent_writer(View::new(self), index) else {
            return;
        };
        let spec = &self.graph.workflow.extracts[index as usize];
        let (path, name) = (&spec.path, &self.graph.workflow.volume(spec.volume).name);
        let mut reason = format!("finished, but did not write '{path}' in volume '{name}'");
        if spec.selections.len() > 1 {
            reason += &format!(": {}", error.detail);
        }
        self.count_own_fault(job);
        if is_last_own_fault(View::new(self), job) {
            self.keep_logs(job);
            self.commit(Decision::Fail {
                job,
                reason,
                output_tail: String::new(),
            });
        } else {
            self.redo(vec![job], Vec::new());
        }
    }

    fn close_extract(&mut self, index: u32, stage: ExtractionState) {
        self.extractions.stages[index as usize] = stage;
        let volume = self.graph.workflow.extracts[index as usize].volume;
        let pipeline = self.graph.close_extract(volume);
        self.release_if_unneeded(volume);
        if let Some(pipeline) = pipeline {
            self.release_kept(pipeline);
        }
    }
}

/// What `bafs volume extract` sends, and where.
fn extract_words(spec: &Extract) -> String {
    let mut words: Vec<String> = spec.selections.iter().map(FileSelection::to_word).collect();
    match spec.is_set() {
        true => words.push(format!("{}/", spec.target)),
        false => words.extend([spec.path.clone(), spec.target.to_string()]),
    }
    let quoted: Vec<String> = words.iter().map(|word| shell_word(word)).collect();
    quoted.join(" ")
}

/// One word of a command that can be pasted into a shell.
fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=@%+,".contains(c);
    match !word.is_empty() && !word.starts_with('-') && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_file_names_are_quoted_for_the_shell() {
        assert_eq!(shell_word("bafs://home/res/out.1"), "bafs://home/res/out.1");
        assert_eq!(shell_word("a b"), "'a b'");
        assert_eq!(shell_word("it's"), r"'it'\''s'");
        assert_eq!(shell_word("$(x)"), "'$(x)'");
    }
}
