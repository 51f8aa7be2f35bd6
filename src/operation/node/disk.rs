//! Whether the disks of pools answer. Each query has a timeout, since a disk may hang.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::place::{self, FoundPlace, OpenOptions};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::host::question::TimedQueries;
use crate::model::PoolDefinition;

/// Queries by the name of a pool, some of which may never return.
pub(in crate::operation) type PoolQueries = TimedQueries<(&'static str, String)>;

/// A disk answers within milliseconds, or within seconds if it is busy.
pub(in crate::operation) const DISK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the space of a pool may take to read: the query examines each image.
pub(super) const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether the disk of a pool that is not open answers reads and writes, with success or with an
/// error. It makes the same accesses as the opening of the pool.
pub(in crate::operation) fn answers(
    host: &Arc<dyn Host>,
    questions: &PoolQueries,
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
    questions: &PoolQueries,
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

/// Opens the place of a pool. `None` if that takes longer than `max_wait`: it goes on, and a later
/// call finds what it has opened. It takes minutes to create the records of a large pool of LVM on a
/// slow disk, and does not end while a disk answers reads only.
pub(in crate::operation) fn open(
    host: &Arc<dyn Host>,
    questions: &PoolQueries,
    definition: &PoolDefinition,
    opening: OpenOptions,
    max_wait: Duration,
) -> Option<Result<FoundPlace>> {
    let about = ("opening", definition.name.clone());
    let (host, definition) = (host.clone(), definition.clone());
    let question = move || place::open(host.as_ref(), &definition, &opening);
    questions.ask(about, max_wait, question)
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

/// The reason for which a pool whose opening has not ended is not served.
pub(in crate::operation) fn still_opening(definition: &PoolDefinition) -> Error {
    Error::unreachable(
        format!("pool {}", definition.name),
        "it is still being opened: its records are being created or checked, or its disk does not answer; it is served as soon as that has ended",
    )
}
