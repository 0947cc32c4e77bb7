stage1:
	ds_read_b128 v[212:215], v185 offset:4096
	s_waitcnt lgkmcnt(0)
	v_perm_b32 v196, v216, v212, s11
	v_pk_fma_f32 v[134:135], v[134:135], v[138:139], v[142:143] op_sel_hi:[1,0,1]
	v_mfma_f32_16x16x16_bf16 v[130:133], v[196:197], v[210:211], v[130:133]
	v_perm_b32 v197, v192, v220, s16
	v_perm_b32 v196, v216, v212, s16
	v_perm_b32 v192, v217, v213, s16
	v_fma_f32 v136, v136, v138, v140
	v_fma_f32 v137, v137, v138, v141
	v_mfma_f32_16x16x16_bf16 v[126:129], v[196:197], v[210:211], v[126:129]
	v_perm_b32 v197, v193, v221, s11
	v_perm_b32 v193, v193, v221, s16
	v_perm_b32 v196, v217, v213, s11
	s_nop 0
	v_mfma_f32_16x16x16_bf16 v[118:121], v[192:193], v[210:211], v[118:121]
	v_perm_b32 v192, v218, v214, s11
	v_perm_b32 v193, v194, v222, s11
	s_nop 0
	v_mfma_f32_16x16x16_bf16 v[114:117], v[192:193], v[210:211], v[114:117]
	s_endpgm
.Lfunc_end0:
