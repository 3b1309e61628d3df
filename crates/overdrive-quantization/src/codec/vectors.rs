//! Plain loops compiled for several instruction sets.

/// The sets that [`vectorised`] compiles for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the target always has: SSE2 on x86-64, NEON on aarch64.
    Portable,
}

impl Set {
    /// The widest of this machine, or the narrower one that the environment variable `OVERDRIVE_SIMD`
    /// (`avx512`, `avx2` or `portable`) names.
    pub(super) fn best() -> Set {
        static BEST: std::sync::OnceLock<Set> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| {
            let wanted = std::env::var("OVERDRIVE_SIMD").ok();
            let allowed = |name| wanted.as_deref().is_none_or(|wanted| wanted == name);
            #[cfg(target_arch = "x86_64")]
            {
                let wide = std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl");
                if wide && allowed("avx512") {
                    return Set::Avx512;
                }
                if std::arch::is_x86_feature_detected!("avx2") && allowed("avx2") {
                    return Set::Avx2;
                }
            }
            let _ = allowed;
            Set::Portable
        })
    }
}

/// Defines a function whose body is compiled for each [`Set`] and run with the best. What it calls
/// must be `#[inline(always)]` to be compiled along with it.
macro_rules! vectorised {
    ($(
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident$(<$(const $constant:ident: $kind:ty),+>)?(
            $($argument:ident: $type:ty),* $(,)?
        ) $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$attribute])*
        $vis fn $name$(<$(const $constant: $kind),+>)?($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body$(<$(const $constant: $kind),+>)?($($argument: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
                fn avx512$(<$(const $constant: $kind),+>)?($($argument: $type),*) $(-> $result)? {
                    body$(::<$($constant),+>)?($($argument),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2$(<$(const $constant: $kind),+>)?($($argument: $type),*) $(-> $result)? {
                    body$(::<$($constant),+>)?($($argument),*)
                }
                #[allow(unsafe_code, reason = "a call that needs instructions")]
                match crate::codec::vectors::Set::best() {
                    // SAFETY: `best` names a set only where the machine has its instructions.
                    crate::codec::vectors::Set::Avx512 => unsafe {
                        return avx512$(::<$($constant),+>)?($($argument),*);
                    },
                    // SAFETY: as above.
                    crate::codec::vectors::Set::Avx2 => unsafe {
                        return avx2$(::<$($constant),+>)?($($argument),*);
                    },
                    crate::codec::vectors::Set::Portable => {}
                }
            }
            body$(::<$($constant),+>)?($($argument),*)
        }
    )*};
}
pub(super) use vectorised;
