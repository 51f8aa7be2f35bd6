//! Steps of a cut and their answers as messages, for both ends of a stream.

use std::time::Duration;

use super::cut_request::{Ahead, CutNow, Freeze, Prepare, Ready, Step, Written};
use super::cut_response::{self, AllWritten, Answer, Frozen};
use crate::cut::participant::{CutAnswer, CutStep, Prepared, Readiness, Thawed};
use crate::model::Level;

impl From<CutStep> for Step {
    fn from(step: CutStep) -> Step {
        match step {
            CutStep::Ready(level) => Step::Ready(Ready {
                level: level.as_str().to_string(),
            }),
            CutStep::Ahead { hooks } => Step::Ahead(Ahead { hooks }),
            CutStep::Prepare => Step::Prepare(Prepare {}),
            CutStep::Freeze => Step::Freeze(Freeze {}),
            CutStep::Cut => Step::Cut(CutNow {}),
            CutStep::Written => Step::Written(Written {}),
        }
    }
}

/// Returns a message that is no step of a cut as it was.
impl TryFrom<Step> for CutStep {
    type Error = Step;

    fn try_from(step: Step) -> Result<CutStep, Step> {
        Ok(match step {
            Step::Ready(ready) => match Level::parse(&ready.level) {
                Some(level) => CutStep::Ready(level),
                None => return Err(Step::Ready(ready)),
            },
            Step::Ahead(Ahead { hooks }) => CutStep::Ahead { hooks },
            Step::Prepare(_) => CutStep::Prepare,
            Step::Freeze(_) => CutStep::Freeze,
            Step::Cut(_) => CutStep::Cut,
            Step::Written(_) => CutStep::Written,
            other @ (Step::Begin(_) | Step::Keep(_) | Step::Commit(_)) => return Err(other),
        })
    }
}

impl From<CutAnswer> for Answer {
    fn from(answer: CutAnswer) -> Answer {
        match answer {
            CutAnswer::Ready(ready) => {
                let (most_extents_volume_id, most_extents) = ready.most_extents.unwrap_or_default();
                Answer::Ready(cut_response::Readiness {
                    in_use: ready.in_use as u64,
                    raw: ready.raw as u64,
                    frozen: ready.frozen as u64,
                    stall_micros: micros(ready.stall),
                    most_extents_volume_id,
                    most_extents,
                    quiet: ready.quiet as u64,
                })
            }
            CutAnswer::Ahead(done) => Answer::Ahead(done.into()),
            CutAnswer::Prepared(done) => Answer::Prepared(done.into()),
            CutAnswer::Frozen => Answer::Frozen(Frozen {}),
            CutAnswer::Thawed(done) => Answer::Thawed(cut_response::Thawed {
                extents: done.extents,
                lost: done.lost.unwrap_or_default(),
            }),
            CutAnswer::Written => Answer::Written(AllWritten {}),
        }
    }
}

/// Returns a message that answers no step of a cut as it was.
impl TryFrom<Answer> for CutAnswer {
    type Error = Answer;

    fn try_from(answer: Answer) -> Result<CutAnswer, Answer> {
        Ok(match answer {
            Answer::Ready(ready) => CutAnswer::Ready(Readiness {
                in_use: ready.in_use as usize,
                raw: ready.raw as usize,
                frozen: ready.frozen as usize,
                quiet: ready.quiet as usize,
                stall: Duration::from_micros(ready.stall_micros),
                most_extents: most(ready.most_extents_volume_id, ready.most_extents),
            }),
            Answer::Ahead(done) => CutAnswer::Ahead(done.into()),
            Answer::Prepared(done) => CutAnswer::Prepared(done.into()),
            Answer::Frozen(_) => CutAnswer::Frozen,
            Answer::Thawed(done) => CutAnswer::Thawed(Thawed {
                extents: done.extents,
                lost: (!done.lost.is_empty()).then_some(done.lost),
            }),
            Answer::Written(_) => CutAnswer::Written,
            other @ (Answer::Begun(_)
            | Answer::Kept(_)
            | Answer::Committed(_)
            | Answer::Failed(_)) => return Err(other),
        })
    }
}

impl From<Prepared> for cut_response::Prepared {
    fn from(done: Prepared) -> cut_response::Prepared {
        let (most_extents_volume_id, most_extents) = done.most_extents.unwrap_or_default();
        cut_response::Prepared {
            sync_micros: micros(done.sync),
            extents: done.extents,
            stall_micros: micros(done.stall),
            most_extents_volume_id,
            most_extents,
        }
    }
}

impl From<cut_response::Prepared> for Prepared {
    fn from(done: cut_response::Prepared) -> Prepared {
        Prepared {
            sync: Duration::from_micros(done.sync_micros),
            extents: done.extents,
            stall: Duration::from_micros(done.stall_micros),
            most_extents: most(done.most_extents_volume_id, done.most_extents),
        }
    }
}

fn most(volume_id: String, extents: u64) -> Option<(String, u64)> {
    (!volume_id.is_empty()).then_some((volume_id, extents))
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::agent::{CutRequest, CutResponse};

    /// What is accepted is the same after it was sent once more.
    fn fuzz_stream<M, T>(name: &str, seeds: &[T], wrap: fn(T) -> M, read: fn(M) -> Option<T>)
    where
        M: Message + Default,
        T: Clone + PartialEq + std::fmt::Debug,
    {
        let encoded: Vec<_> = seeds
            .iter()
            .map(|seed| wrap(seed.clone()).encode_to_vec())
            .collect();
        let read = |bytes: &[u8]| read(M::decode(bytes).ok()?);
        let target = |bytes: &[u8]| {
            if let Some(first) = read(bytes) {
                let again = read(&wrap(first.clone()).encode_to_vec());
                assert_eq!(again.as_ref(), Some(&first));
            }
        };
        slackwater_core::fuzz::fuzz(name, &encoded, target, |bytes| {
            assert!(read(bytes).is_none_or(|value| seeds.contains(&value)));
        });
    }

    #[test]
    fn fuzz_steps() {
        let steps = [
            CutStep::Ready(Level::Application),
            CutStep::Ahead { hooks: true },
            CutStep::Prepare,
            CutStep::Cut,
        ];
        let wrap = |step: CutStep| CutRequest {
            step: Some(step.into()),
        };
        fuzz_stream("steps of a cut", &steps, wrap, |request| {
            request.step?.try_into().ok()
        });
    }

    #[test]
    fn fuzz_answers() {
        let answers = [
            CutAnswer::Ready(Readiness {
                in_use: 2,
                raw: 1,
                frozen: 1,
                quiet: 3,
                stall: Duration::from_micros(70),
                most_extents: Some(("volume".into(), 9)),
            }),
            CutAnswer::Prepared(Prepared {
                sync: Duration::from_micros(40),
                extents: 3,
                stall: Duration::from_micros(70),
                most_extents: Some(("volume".into(), 9)),
            }),
            CutAnswer::Thawed(Thawed {
                extents: 5,
                lost: Some("a device".into()),
            }),
            CutAnswer::Written,
        ];
        let wrap = |answer: CutAnswer| CutResponse {
            answer: Some(answer.into()),
        };
        fuzz_stream("answers of a cut", &answers, wrap, |response| {
            response.answer?.try_into().ok()
        });
    }
}
