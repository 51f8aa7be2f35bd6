//! The certificate authority and its rotation. All agents trust the next authority before it signs, and
//! they trust the previous one for as long as a certificate of it may be in use.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::tls::TlsError;
use crate::tls::authority::{Authority, Validity};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// The validity of a certificate of a node or a router. It is renewed after half of this.
pub const LEAF_VALIDITY: Duration = DAY.saturating_mul(30);
const AUTHORITY_VALIDITY: Duration = DAY.saturating_mul(3 * 365);
/// An authority of this age gets a successor.
const ROTATION_AGE: SignedDuration = SignedDuration::from_hours(365 * 24);
/// The successor is published for this time before it signs. Agents read it every ten minutes.
const PREPUBLICATION_PERIOD: SignedDuration = SignedDuration::from_hours(24);
/// The predecessor is trusted for this time, which is longer than the validity of its certificates.
const PREDECESSOR_TRUST_PERIOD: SignedDuration = SignedDuration::from_hours(40 * 24);

/// The validity of a certificate that is signed now.
pub(super) fn leaf() -> Validity {
    Validity::from_now(LEAF_VALIDITY)
}

/// An authority, with the time since when it is the current, next or previous one.
#[derive(Clone, PartialEq, Eq)]
struct One {
    certificate: String,
    /// A secret. The key of the predecessor is discarded.
    key: Option<String>,
    since: Timestamp,
}

/// The authority that signs, the next one, and the previous one.
#[derive(Clone, PartialEq, Eq)]
pub struct Authorities {
    current: One,
    next: Option<One>,
    previous: Option<One>,
}

impl std::fmt::Debug for Authorities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authorities").finish_non_exhaustive()
    }
}

impl Authorities {
    /// Reads the data of a Secret; `None` if it has none. Data that cannot be read is an error and is not
    /// replaced, because certificates of this authority are in use.
    pub fn read(data: &BTreeMap<String, String>) -> Result<Option<Authorities>, String> {
        let one = |stem: &str, has_key: bool| {
            let of = |end: &str| data.get(&format!("{stem}.{end}")).cloned();
            let (certificate, key, since) = (of("crt"), of("key"), of("since"));
            match (certificate, key, since) {
                (None, None, None) => Ok(None),
                (Some(certificate), key, Some(since)) if key.is_some() == has_key => {
                    let since = since.parse();
                    let since = since.map_err(|error| format!("{stem}.since: {error}"))?;
                    Ok(Some(One {
                        certificate,
                        key,
                        since,
                    }))
                }
                _ => Err(format!(
                    "{stem}.crt, {stem}.key and {stem}.since in the Secret do not match"
                )),
            }
        };
        let (current, next) = (one("current", true)?, one("next", true)?);
        let previous = one("previous", false)?;
        match current {
            Some(current) => Ok(Some(Authorities {
                current,
                next,
                previous,
            })),
            None if next.is_none() && previous.is_none() => Ok(None),
            None => Err("the Secret has no current.crt".into()),
        }
    }

    /// The data of the Secret.
    pub fn data(&self) -> BTreeMap<String, String> {
        let mut data = BTreeMap::new();
        let parts = [
            ("current", Some(&self.current)),
            ("next", self.next.as_ref()),
            ("previous", self.previous.as_ref()),
        ];
        for (stem, one) in parts {
            let Some(one) = one else { continue };
            data.insert(format!("{stem}.crt"), one.certificate.clone());
            data.insert(format!("{stem}.since"), one.since.to_string());
            if let Some(key) = &one.key {
                data.insert(format!("{stem}.key"), key.clone());
            }
        }
        data
    }

    /// What is to replace the present authorities; `None` if they are as they should be.
    pub fn step(now: Option<&Authorities>, at: Timestamp) -> Result<Option<Authorities>, TlsError> {
        let Some(now) = now else {
            return Ok(Some(Authorities {
                current: One::new(at)?,
                next: None,
                previous: None,
            }));
        };
        let age = |one: &One| at.duration_since(one.since);
        let mut then = now.clone();
        if now
            .previous
            .as_ref()
            .is_some_and(|previous| age(previous) >= PREDECESSOR_TRUST_PERIOD)
        {
            then.previous = None;
        }
        match &now.next {
            None if age(&now.current) >= ROTATION_AGE => then.next = Some(One::new(at)?),
            Some(next) if age(next) >= PREPUBLICATION_PERIOD => {
                let last = std::mem::replace(&mut then.current, next.clone());
                then.current.since = at;
                then.next = None;
                then.previous = Some(One {
                    key: None,
                    since: at,
                    ..last
                });
            }
            Some(_) | None => {}
        }
        Ok((&then != now).then_some(then))
    }

    /// The certificates of all trusted authorities.
    pub fn bundle(&self) -> String {
        let all = [
            Some(&self.current),
            self.next.as_ref(),
            self.previous.as_ref(),
        ];
        let each = all.into_iter().flatten();
        each.map(|one| format!("{}\n", one.certificate.trim_end()))
            .collect()
    }

    /// The authority that signs now.
    pub fn signs(&self) -> Result<Authority, TlsError> {
        let key = self.current.key.as_deref().unwrap_or_default();
        Authority::from_pem(&self.current.certificate, key)
    }
}

impl One {
    fn new(at: Timestamp) -> Result<One, TlsError> {
        let from = SystemTime::from(at);
        let authority = Authority::new(Validity {
            from: from - DAY,
            until: from + AUTHORITY_VALIDITY,
        })?;
        Ok(One {
            certificate: authority.certificate().to_string(),
            key: Some(authority.key()),
            since: at,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(n: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + n * 24 * 3600).unwrap()
    }

    fn trusted(all: &Authorities) -> usize {
        all.bundle().matches("BEGIN CERTIFICATE").count()
    }

    #[test]
    fn no_client_meets_an_authority_that_it_does_not_trust() {
        let first = Authorities::step(None, day(0)).unwrap().unwrap();
        assert_eq!(trusted(&first), 1);
        assert_eq!(Authorities::step(Some(&first), day(364)).unwrap(), None);
        let shown = Authorities::step(Some(&first), day(365)).unwrap().unwrap();
        assert_eq!(
            (trusted(&shown), &shown.current.certificate),
            (2, &first.current.certificate),
            "the first still signs"
        );
        assert_eq!(Authorities::step(Some(&shown), day(365)).unwrap(), None);
        let signs = Authorities::step(Some(&shown), day(366)).unwrap().unwrap();
        assert_eq!(trusted(&signs), 2, "what the first has signed is in use");
        assert_eq!(signs.current.certificate, shown.next.unwrap().certificate);
        assert!(!signs.data().contains_key("previous.key"));
        assert_eq!(Authorities::step(Some(&signs), day(405)).unwrap(), None);
        let alone = Authorities::step(Some(&signs), day(406)).unwrap().unwrap();
        assert_eq!(trusted(&alone), 1);
        assert!(PREDECESSOR_TRUST_PERIOD > SignedDuration::try_from(LEAF_VALIDITY).unwrap());
        assert!(
            AUTHORITY_VALIDITY.as_secs() as i64
                > (ROTATION_AGE + PREPUBLICATION_PERIOD + PREDECESSOR_TRUST_PERIOD).as_secs()
                    + LEAF_VALIDITY.as_secs() as i64
        );
    }

    #[test]
    fn what_is_written_is_read_back_and_nothing_else_is() {
        let mut all = Authorities::step(None, day(0)).unwrap().unwrap();
        all = Authorities::step(Some(&all), day(365)).unwrap().unwrap();
        all = Authorities::step(Some(&all), day(366)).unwrap().unwrap();
        all = Authorities::step(Some(&all), day(731)).unwrap().unwrap();
        let data = all.data();
        assert_eq!(Authorities::read(&data).unwrap().as_ref(), Some(&all));
        assert_eq!(Authorities::read(&BTreeMap::new()).unwrap(), None);
        for key in data.keys() {
            let mut less = data.clone();
            less.remove(key);
            assert!(
                Authorities::read(&less).is_err(),
                "without {key} nothing new is made"
            );
        }
        assert!(!format!("{all:?}").contains("KEY"));
        assert_eq!(all.signs().unwrap().certificate(), all.current.certificate);
    }
}
