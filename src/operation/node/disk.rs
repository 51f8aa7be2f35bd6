//! Whether the disks of pools answer. Each query has a timeout, since a disk may hang.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::place;
use crate::error::Error;
use crate::host::Host;
use crate::host::question::Questions;
use crate::model::PoolDefinition;

/// Queries by the name of a pool, some of which may never return.
pub(in crate::operation) type PoolQuestions = Questions<(&'static str, String)>;

/// A disk answers within milliseconds, or within seconds if it is busy.
pub(in crate::operation) const DISK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the space of a pool may take to read: the query examines each image.
pub(super) const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether the disk of a pool that is not open answers reads and writes, with success or with an
/// error. It makes the same accesses as the opening of the pool.
pub(in crate::operation) fn answers(
    host: &Arc<dyn Host>,
    questions: &PoolQuestions,
    definition: &PoolDefinition,
) -> bool {
    let about = ("closed disk", definition.name.clone());
    let (host, definition) = (host.clone(), definition.clone());
    let question = move || place::access(host.as_ref(), &definition);
    questions.ask(about, DISK_TIMEOUT, question).is_some()
}

/// Names of pools whose disks do not answer. All are queried at the same time.
pub(in crate::operation) fn hanging(
    host: &Arc<dyn Host>,
    questions: &PoolQuestions,
    pools: &[PoolDefinition],
) -> BTreeSet<String> {
    std::thread::scope(|scope| {
        let ask = |pool| scope.spawn(move || answers(host, questions, pool));
        let asked: Vec<_> = pools.iter().map(|pool| (&pool.name, ask(pool))).collect();
        let hangs = asked
            .into_iter()
            .filter_map(|(name, asked)| (!asked.join().unwrap_or(false)).then(|| name.clone()));
        hangs.collect()
    })
}

/// The reason for which a pool whose disk does not answer is not served.
pub(in crate::operation) fn no_answer(definition: &PoolDefinition) -> Error {
    Error::Unreachable {
        what: format!("pool {}", definition.name),
        reason: format!(
            "its disk does not answer: nothing could be written to it for {} s; check whether its file system is frozen or its disk is gone",
            DISK_TIMEOUT.as_secs()
        ),
    }
}
