stage1:
	v_perm_b32 v62, v7, v3, s2
	v_perm_b32 v64, v9, v5, s2
	v_perm_b32 v91, v6, v18, s0
	s_nop 0
	v_mfma_f32_16x16x32_fp8_fp8 v[2:5], v[88:89], v[32:33], v[22:25]
	v_perm_b32 v22, v27, v26, s1
	v_perm_b32 v23, v29, v28, s1
	v_perm_b32 v24, v38, v70, s1
	v_perm_b32 v25, v39, v72, s1
	s_endpgm
.Lfunc_end0:
