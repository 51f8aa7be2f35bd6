//! Creates a CA and certificates where there is neither cert-manager nor another issuer.
//!
//! Keys use the curve P-256. The name of a CA is derived from its key, so that an error about an
//! unknown CA identifies it. During a rotation both CAs are trusted, the old and the new one.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

use super::{Bundle, Name, TlsError, request};

/// How long before now a certificate becomes valid, because the clocks of two machines differ.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// The validity period of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Its beginning.
    pub from: SystemTime,
    /// Its end.
    pub until: SystemTime,
}

impl Validity {
    /// A period of this length, which began an hour ago.
    pub fn from_now(length: Duration) -> Validity {
        let now = SystemTime::now();
        Validity {
            from: now - MAX_CLOCK_SKEW,
            until: now + length,
        }
    }
}

/// A CA.
pub struct Authority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Creates a new CA.
    pub fn new(validity: Validity) -> Result<Authority, TlsError> {
        let make = || {
            let key = KeyPair::generate()?;
            let mut params = parameters(&key)?;
            limit(&mut params, validity);
            let certificate = params.self_signed(&key)?;
            Ok((certificate.pem(), Issuer::new(params, key)))
        };
        let (certificate, issuer) = make().map_err(failed("an authority"))?;
        Ok(Authority {
            certificate,
            issuer,
        })
    }

    /// Loads a CA that was created here earlier, from its certificate and its key as PEM.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Authority, TlsError> {
        let read = || {
            let key = KeyPair::from_pem(key)?;
            let params = parameters(&key)?;
            Ok((key, params))
        };
        let (key, params) = read().map_err(failed("an authority"))?;
        Ok(Authority {
            certificate: certificate.to_string(),
            issuer: Issuer::new(params, key),
        })
    }

    /// Its certificate, as PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Its key, as PEM: a secret.
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a certificate with its own key, for both ends of a connection. The bundle trusts only
    /// this CA.
    pub fn issue(&self, name: &Name, validity: Validity) -> Result<Bundle, TlsError> {
        let make = || {
            let key = KeyPair::generate()?;
            let params = leaf(name, validity)?;
            let certificate = params.signed_by(&key, &self.issuer)?;
            Ok((certificate.pem(), key.serialize_pem()))
        };
        let (certificate, key) = make().map_err(failed(&name.to_string()))?;
        Ok(Bundle {
            certificate: certificate.into_bytes(),
            key: key.into_bytes(),
            authorities: self.certificate.clone().into_bytes(),
        })
    }

    /// Issues a certificate, as PEM, for a certificate request (PKCS #10, PEM;
    /// [`super::request::make`]). The name is the one that is passed here, whatever the request
    /// contains; only the key, and the proof that its sender holds it, are taken from the request.
    pub fn sign(
        &self,
        request: &[u8],
        name: &Name,
        validity: Validity,
    ) -> Result<String, TlsError> {
        let key = request::read(request).map_err(|problem| TlsError::Request {
            name: name.clone(),
            problem,
        })?;
        let make = || leaf(name, validity)?.signed_by(&key, &self.issuer);
        let certificate = make().map_err(failed(&name.to_string()))?;
        Ok(certificate.pem())
    }
}

/// The contents of a certificate.
fn leaf(name: &Name, validity: Validity) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(vec![name.to_string()])?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    limit(&mut params, validity);
    Ok(params)
}

/// The contents of a CA certificate, except its dates: always the same for one key.
fn parameters(key: &KeyPair) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    let id: String = (params.key_identifier(key).iter().take(8))
        .map(|byte| format!("{byte:02x}"))
        .collect();
    params.distinguished_name = rcgen::DistinguishedName::new();
    let name = format!("slackwater {id}");
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn limit(params: &mut CertificateParams, validity: Validity) {
    let since_1970 = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let whole = |time| Duration::from_secs(since_1970(time).as_secs());
    params.not_before = date_time_ymd(1970, 1, 1) + whole(validity.from);
    params.not_after = date_time_ymd(1970, 1, 1) + whole(validity.until);
}

fn failed(name: &str) -> impl FnOnce(rcgen::Error) -> TlsError {
    let name = name.to_string();
    move |source| TlsError::Make { name, source }
}
